"""Moves in plain torch, for a host without a compiler: gather a chunk of rows, then scatter it, front to back, in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import gcd

import numpy as np
import torch
from numpy.typing import NDArray

from shared.kernels.compaction.binding import BoundGroup
from shared.kernels.compaction.inputs import RoundInputs
from shared.kernels.compaction.modes import Mode
from shared.kernels.compaction.moves import ZERO, Moves, hole_filling_moves, ordered_moves, scrub_end, window_moves

CHUNK = 1024
"""Rows held outside the pool at a time."""

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def bind(groups: tuple[BoundGroup, ...], inputs: RoundInputs, fault_key: torch.Tensor | None) -> Callable[[int], None]:
    """See `movers.bind`."""
    return partial(_run, groups, inputs, fault_key)


def _run(groups: tuple[BoundGroup, ...], inputs: RoundInputs, fault_key: torch.Tensor | None, request_count: int) -> None:
    if fault_key is not None and int(fault_key) >= 0:
        return
    for group in groups:
        for request in range(request_count):
            for list_row in range(group.list_rows):
                moves = _list(group, inputs, request, list_row)
                if moves is not None and len(moves):
                    _move(group, list_row, moves, _cells(group, request, moves.src), _cells(group, request, moves.dst))


def _list(group: BoundGroup, inputs: RoundInputs, request: int, list_row: int) -> Moves | None:
    start, stop = inputs.move_offsets[request : request + 2].tolist()
    if stop <= start:
        return None
    keep = stop - start - int(inputs.tail[request])
    base, valid_len, tail = int(inputs.base[request]), int(inputs.valid_len[request]), int(group.tail[request])
    scrub_to = scrub_end(base + keep + tail, valid_len + tail, group.geometry.page_size) if group.scrub else 0
    if group.window is not None:
        return window_moves(group.window, keep, base, valid_len, tail, scrub_to) if keep >= group.window else None
    heads = group.geometry.kv_heads
    row = group.first_row[list_row // heads] + list_row % heads if group.list_layer_step else group.first_row[0] + list_row
    build = hole_filling_moves if group.mode is Mode.HOLE_FILLING else ordered_moves
    return build(inputs.kept[request, row, :keep].numpy(), base, valid_len, tail, scrub_to)


def _cells(group: BoundGroup, request: int, ordinals: NDArray[np.int32]) -> NDArray[np.int64]:
    """Byte offset of each ordinal inside a (K or V, head) plane; -1 where there is none."""
    geometry, table = group.geometry, group.block_table[request].numpy()
    entry, slot = np.divmod(ordinals, geometry.page_size)
    page = table[np.clip(entry, 0, len(table) - 1)].astype(np.int64)
    exists = (entry >= 0) & (entry < len(table)) & (page >= 0) & (page < geometry.num_pages)
    return np.where(exists, page * geometry.page_stride + slot * geometry.token_stride, -1)


def _move(group: BoundGroup, list_row: int, moves: Moves, src: NDArray[np.int64], dst: NDArray[np.int64]) -> None:
    """Execute one list on every plane it rules. A row is a few units, the largest pieces that all strides are multiples of."""
    geometry, heads = group.geometry, group.geometry.kv_heads
    layers = [list_row // heads] if group.list_layer_step else range(len(group.pools))
    head = np.array([list_row % heads]) if group.head_step else np.arange(heads)
    unit = gcd(geometry.row_bytes, geometry.page_stride, geometry.kv_stride, geometry.head_stride, geometry.token_stride)
    planes = (np.arange(2) * geometry.kv_stride)[:, None] + head * geometry.head_stride
    pieces = (planes.reshape(-1, 1) + np.arange(0, geometry.row_bytes, unit)).flatten() // unit

    zero = moves.src == ZERO
    doable = np.flatnonzero((dst >= 0) & (zero | (src >= 0)))
    for low in range(0, len(doable), CHUNK):
        here = doable[low : low + CHUNK]
        read, blank = (src[here, None] // unit + pieces).clip(0), zero[here]
        from_units, to_units = (torch.from_numpy(index.flatten()) for index in (read, dst[here, None] // unit + pieces))
        for layer in layers:
            units = _units(group.pools[layer], unit)
            rows = units.index_select(0, from_units)
            rows.view(len(here), -1)[torch.from_numpy(blank)] = 0
            units.index_copy_(0, to_units, rows)


def _units(pool: torch.Tensor, unit: int) -> torch.Tensor:
    """Everything a byte view spans as `[units, words]`, padding included, in the widest words: torch copies word by word."""
    span = sum(stride * (size - 1) for stride, size in zip(pool.stride(), pool.shape, strict=True)) + 1
    return pool.as_strided((span // unit, unit), (unit, 1)).view(_WORDS[gcd(8, unit, pool.storage_offset())])

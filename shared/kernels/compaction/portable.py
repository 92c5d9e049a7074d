"""Moves in plain torch, for a host without a compiler: gather a chunk of rows, then scatter it, front to back, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from shared.kernels.compaction.binding import BoundGroup
from shared.kernels.compaction.inputs import RoundInputs
from shared.kernels.compaction.layout import Mode
from shared.kernels.compaction.moves import ZERO, Moves, hole_filling_moves, ordered_moves, scrub_end, window_moves

CHUNK = 1024
"""Rows held outside the pool at a time."""


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
                    cells = _cells(group, request, moves.src), _cells(group, request, moves.dst)
                    for planes in _planes(group, list_row):
                        _move(planes, moves, *cells)


def _planes(group: BoundGroup, list_row: int) -> Iterator[torch.Tensor]:
    """Views `[pages, 2, heads, page_size, row_bytes]` of what one list of moves rules."""
    heads = group.geometry.kv_heads
    if group.list_layer_step:
        head = list_row % heads
        yield group.pools[list_row // heads][:, :, head : head + 1]
    elif group.head_step:
        yield from (pool[:, :, list_row : list_row + 1] for pool in group.pools)
    else:
        yield from group.pools


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


def _cells(group: BoundGroup, request: int, ordinals: NDArray[np.int32]) -> tuple[torch.Tensor, torch.Tensor]:
    """(page, slot) of each ordinal; page -1 where there is none."""
    page_size, table = group.geometry.page_size, group.block_table[request].numpy()
    entry = np.clip(ordinals // page_size, 0, len(table) - 1)
    page = table[entry]
    exists = (ordinals // page_size == entry) & (page >= 0) & (page < group.geometry.num_pages)
    return torch.from_numpy(np.where(exists, page, -1).astype(np.int64)), torch.from_numpy((ordinals % page_size).astype(np.int64))


def _move(
    planes: torch.Tensor, moves: Moves, src: tuple[torch.Tensor, torch.Tensor], dst: tuple[torch.Tensor, torch.Tensor]
) -> None:
    zero = torch.from_numpy(moves.src == ZERO)
    doable = (dst[0] >= 0) & (zero | (src[0] >= 0))
    for low in range(0, len(moves), CHUNK):
        here = doable[low : low + CHUNK]
        src_page, src_slot, dst_page, dst_slot, blank = (part[low : low + CHUNK][here] for part in (*src, *dst, zero))
        rows = planes[src_page, :, :, src_slot]
        rows[blank] = 0
        planes[dst_page, :, :, dst_slot] = rows

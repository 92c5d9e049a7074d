"""The specification: one row at a time, every source read from a pristine clone. Slow and obvious; everything else equals it.

Semantics it fixes: a move whose source or destination is unmapped, or out of the table or the pool, does nothing; a request
without moves, and a masked window in a request that keeps fewer entries than the window, is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from shared.kernels.compaction.binding import BoundGroup
from shared.kernels.compaction.inputs import RoundInputs
from shared.kernels.compaction.modes import Mode


def bind(groups: tuple[BoundGroup, ...], inputs: RoundInputs, fault_key: torch.Tensor | None) -> Callable[[int], None]:
    """See `movers.bind`."""
    return partial(_run, groups, inputs, fault_key)


def _run(groups: tuple[BoundGroup, ...], inputs: RoundInputs, fault_key: torch.Tensor | None, request_count: int) -> None:
    if fault_key is not None and int(fault_key) >= 0:
        return
    for group in groups:
        pristine = [pool.clone() for pool in group.pools]
        for request in range(request_count):
            for layer, (pool, before) in enumerate(zip(group.pools, pristine, strict=True)):
                for head in range(group.geometry.kv_heads):
                    for source, destination in _moves(group, inputs, request, layer, head):
                        _move(group, request, head, before, pool, source, destination)


def _move(
    group: BoundGroup, request: int, head: int, before: torch.Tensor, pool: torch.Tensor, source: int | None, destination: int
) -> None:
    to = _locate(group, request, destination)
    come = _locate(group, request, source) if source is not None else None
    if to is None or (source is not None and come is None):
        return
    row = before[come[0], :, head, come[1]] if come is not None else torch.zeros_like(pool[to[0], :, head, to[1]])
    pool[to[0], :, head, to[1]] = row


def _locate(group: BoundGroup, request: int, ordinal: int) -> tuple[int, int] | None:
    """(page, slot) of a request's ordinal, None where there is none."""
    page_size = group.geometry.page_size
    if not 0 <= ordinal < group.block_table.shape[1] * page_size:
        return None
    page = int(group.block_table[request, ordinal // page_size])
    return (page, ordinal % page_size) if 0 <= page < group.geometry.num_pages else None


def _moves(group: BoundGroup, inputs: RoundInputs, request: int, layer: int, head: int) -> Iterator[tuple[int | None, int]]:
    """(source, destination) ordinals of one (request, layer, head); source None is zeros."""
    count = int(inputs.move_offsets[request + 1]) - int(inputs.move_offsets[request])
    if count == 0:
        return
    keep = count - int(inputs.tail[request])
    base, valid_len, tail = int(inputs.base[request]), int(inputs.valid_len[request]), int(group.tail[request])
    if group.window is not None:
        if keep < group.window:
            return
        survivors = list(range(valid_len - group.window, valid_len))
    else:
        survivors = inputs.kept[request, group.first_row[layer] + head * group.head_step, :keep].tolist()
    end = base + keep
    if group.mode is Mode.ORDERED:
        yield from zip(survivors, range(end - len(survivors), end), strict=True)
    else:
        kept = set(survivors)
        holes = [ordinal for ordinal in range(base, end) if ordinal not in kept]
        yield from zip([ordinal for ordinal in survivors if ordinal >= end], holes, strict=True)
    yield from ((valid_len + i, end + i) for i in range(tail))
    if group.scrub:
        end += tail
        page_size = group.geometry.page_size
        yield from ((None, cell) for cell in range(end, valid_len + tail) if cell // page_size == (end - 1) // page_size)

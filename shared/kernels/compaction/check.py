"""The value check: what host validation cannot see without waiting for the device. For tests and debugging.

It runs on the device in stream order and writes one number, the first offender's key; movers read it there and move nothing
while there is one. It allocates, unlike a round without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch

from shared.kernels.compaction.binding import BoundGroup
from shared.kernels.compaction.inputs import RoundInputs
from shared.kernels.compaction.modes import Mode

NO_FAULT = -1


class FaultKind(StrEnum):
    """What is wrong; members in the order they are reported in, when one entry has several."""

    OFFSETS = "move_offsets must start at 0 and never fall"
    COUNT = "keep and tails must be within their capacities"
    LENGTH = "base + keep must be within valid_len, and valid_len + tail within the block table"
    WINDOW = "a masked window must be kept whole"
    ORDER = "kept ordinals must strictly increase"
    OVERTAKE = "a destination must not pass its source (base + i <= kept[i])"
    RANGE = "kept ordinals must be below valid_len"
    UNMAPPED = "a page that is moved from or to is not mapped, or not in the pool"
    SHARED = "a page that is moved to belongs to another request too"


_KINDS = tuple(FaultKind)


@dataclass(frozen=True, slots=True)
class Fault:
    """First offender: of the lowest request, then decision row, then index. `index` is the entry's place in its kept row for
    order, overtake and range, and the page's place in the block table for unmapped and shared."""

    kind: FaultKind
    request: int
    row: int
    index: int

    def __str__(self) -> str:
        return f"request {self.request}, decision row {self.row}, index {self.index}: {self.kind}; nothing was moved"


@dataclass(frozen=True, slots=True, eq=False)
class ValueCheck:
    """`key` is an int64 scalar on the device: NO_FAULT, or the first offender in mixed radix (request, row, index, kind).
    `rows`: the decision rows that each group follows."""

    key: torch.Tensor
    groups: tuple[BoundGroup, ...]
    rows: tuple[torch.Tensor, ...]
    inputs: RoundInputs

    @classmethod
    def allocate(cls, groups: tuple[BoundGroup, ...], inputs: RoundInputs) -> ValueCheck:
        device = inputs.kept.device
        rows = tuple(torch.tensor(_decision_rows_of(group), device=device) for group in groups)
        return cls(torch.full((), NO_FAULT, dtype=torch.int64, device=device), groups, rows, inputs)

    def fault(self) -> Fault | None:
        """Decode `key`; waits for the device."""
        key = int(self.key)
        if key == NO_FAULT:
            return None
        key, kind = divmod(key, len(_KINDS))
        key, index = divmod(key, self._width)
        request, row = divmod(key, self.inputs.kept.shape[1])
        return Fault(_KINDS[kind], request, row, index)

    def run(self, request_count: int) -> None:
        """Check the first `request_count` requests and write `key`."""
        lengths = _Lengths.of(self.inputs, request_count)
        found = [self._first(kind, mask) for kind, mask in _decision_faults(self.inputs, lengths)]
        for group, followed in zip(self.groups, self.rows, strict=True):
            faults = _group_faults(group, followed, self.inputs, lengths)
            found += [self._first(kind, mask, rows) for kind, mask, rows in faults]
        first = torch.stack(found).amin()
        self.key.copy_(torch.where(first == torch.iinfo(torch.int64).max, NO_FAULT, first))

    @property
    def _width(self) -> int:
        return max(self.inputs.keep_capacity, *(group.block_table.shape[1] for group in self.groups), 1)

    def _first(self, kind: FaultKind, mask: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Lowest key among the set places of `mask`: `[requests]`, or `[requests, rows, index]` of the given decision rows."""
        while mask.dim() < 3:
            mask = mask.unsqueeze(-1)
        axes = [torch.arange(size, device=mask.device) for size in mask.shape]
        row = rows if rows is not None else axes[1]
        place = axes[0][:, None, None] * self.inputs.kept.shape[1] + row[None, :, None]
        key = (place * self._width + axes[2]) * len(_KINDS) + _KINDS.index(kind)
        return torch.where(mask, key, torch.iinfo(torch.int64).max).amin()


@dataclass(frozen=True, slots=True, eq=False)
class _Lengths:
    """Per request `[n, 1, 1]`, int64, clamped to what memory allows, so that later checks are safe after an earlier fault."""

    count: int
    moves: torch.Tensor
    keep: torch.Tensor
    base: torch.Tensor
    valid_len: torch.Tensor
    active: torch.Tensor

    @classmethod
    def of(cls, inputs: RoundInputs, count: int) -> _Lengths:
        moves = (inputs.move_offsets[1 : count + 1].long() - inputs.move_offsets[:count].long())[:, None, None]
        keep = moves - inputs.tail[:count].long()[:, None, None]
        base, valid_len = (tensor[:count].long()[:, None, None] for tensor in (inputs.base, inputs.valid_len))
        return cls(count, moves, keep.clamp(0, inputs.keep_capacity), base, valid_len, moves > 0)


def _decision_faults(inputs: RoundInputs, at: _Lengths) -> list[tuple[FaultKind, torch.Tensor]]:
    kept = inputs.kept[: at.count].long()
    index = torch.arange(inputs.keep_capacity, device=kept.device)
    live = (index < at.keep) & at.active
    tail, draft_tail = (tensor[: at.count].long()[:, None, None] for tensor in (inputs.tail, inputs.draft_tail))
    capacity = inputs.tail_capacity
    bad_tail = (tail < 0) | (tail > capacity) | (draft_tail < 0) | (draft_tail > capacity)
    falls = torch.zeros_like(live.expand_as(kept))
    falls[:, :, 1:] = kept[:, :, 1:] <= kept[:, :, :-1]
    start = torch.zeros_like(at.moves, dtype=torch.bool)
    start[0] = inputs.move_offsets[0] != 0
    return [
        (FaultKind.OFFSETS, (at.moves < 0) | start),
        (FaultKind.COUNT, at.active & (bad_tail | (at.moves - tail != at.keep))),
        (FaultKind.LENGTH, at.active & ((at.base < 0) | (at.base + at.keep > at.valid_len))),
        (FaultKind.ORDER, falls & live),
        (FaultKind.OVERTAKE, (kept < at.base + index) & live),
        (FaultKind.RANGE, (kept >= at.valid_len) & live),
    ]


def _group_faults(
    group: BoundGroup, rows: torch.Tensor, inputs: RoundInputs, at: _Lengths
) -> list[tuple[FaultKind, torch.Tensor, torch.Tensor]]:
    device, page_size = inputs.kept.device, group.geometry.page_size
    table = group.block_table[: at.count].long()
    tail = group.tail[: at.count].long().clamp(0, inputs.tail_capacity)[:, None, None]
    old_end = at.valid_len + tail
    source, destination = _touched(group, inputs, at, rows, tail)
    by_page = (at.count, len(rows), table.shape[1], page_size)
    source, destination = (mask.expand(by_page[0], by_page[1], -1).view(by_page).any(-1) for mask in (source, destination))
    mapped = (table >= 0) & (table < group.geometry.num_pages)

    entry = torch.arange(table.shape[1], device=device)
    owned = mapped & at.active[:, 0] & (entry * page_size < old_end[:, 0])
    owners = torch.zeros(group.geometry.num_pages, at.count, dtype=torch.bool, device=device)
    request = torch.arange(at.count, device=device)[:, None].expand_as(table)
    # Not owners[...] = True: boolean selection would wait for the device to learn its size.
    owners.view(-1).index_put_(
        ((table.clamp(0, len(owners) - 1) * at.count + request).flatten(),), owned.flatten(), accumulate=True
    )
    shared = owners.sum(1)[table.clamp(0, len(owners) - 1)] > owned.long()
    window = torch.zeros_like(at.active) if group.window is None else at.active & (at.keep < group.window)
    return [
        (FaultKind.LENGTH, at.active & (old_end > table.shape[1] * page_size), rows[:1]),
        (FaultKind.WINDOW, window, rows[:1]),
        (FaultKind.UNMAPPED, (source | destination) & ~mapped[:, None] & at.active, rows),
        (FaultKind.SHARED, destination & shared[:, None] & mapped[:, None] & at.active, rows),
    ]


def _decision_rows_of(group: BoundGroup) -> list[int]:
    heads = range(group.geometry.kv_heads if group.head_step else 1)
    return sorted({first + head for first in group.first_row for head in heads})


def _touched(
    group: BoundGroup, inputs: RoundInputs, at: _Lengths, rows: torch.Tensor, tail: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Masks over ordinals `[n, rows or 1, max_pages * page_size]`: what moves read and what they write, identity moves apart."""
    page_size = group.geometry.page_size
    ordinal = torch.arange(group.block_table.shape[1] * page_size, device=rows.device)
    end, old_end = at.base + at.keep, at.valid_len + tail

    def within(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        return (ordinal >= low) & (ordinal < high)

    if group.window is not None:
        source, destination = within(at.valid_len - group.window, at.valid_len), within(end - group.window, end)
        moved = at.valid_len != end
        source, destination = source & moved, destination & moved
    else:
        kept = inputs.kept[: at.count].long().index_select(1, rows)
        index = torch.arange(inputs.keep_capacity, device=rows.device)
        entry = torch.where(index < at.keep, kept.clamp(-1, len(ordinal) - 1), -1) + 1
        occupied = torch.zeros(*kept.shape[:2], len(ordinal) + 1, dtype=torch.bool, device=rows.device)
        occupied = occupied.scatter_(2, entry, torch.ones_like(entry, dtype=torch.bool))[:, :, 1:]
        if group.mode is Mode.HOLE_FILLING:
            source, destination = occupied & (ordinal >= end), ~occupied & within(at.base, end)
        else:
            identity = ((kept == at.base + index) & (index < at.keep)).sum(2, keepdim=True)
            source, destination = occupied & (ordinal >= at.base + identity), within(at.base + identity, end)
    moved = at.valid_len != end
    source = source | (within(at.valid_len, old_end) & moved)
    destination = destination | (within(end, end + tail) & moved)
    if group.scrub:
        page_end = -(-(end + tail) // page_size) * page_size
        destination = destination | within(end + tail, torch.minimum(page_end, old_end))
    return source, destination

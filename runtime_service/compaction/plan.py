"""What a round does to one sequence's memory: a pure function of the decision and the page table.

    page size 4, pages 7 3 9, 11 entries, kept 0 1 5 9 10

    before   7: 0 1 2 3     3: 4 5 6 7     9: 8 9 10 .
    moves    base 2: 5 -> 2, 9 -> 3, 10 -> 4
    after    7: 0 1 5 9     3: 10 z z z    page 9 is free, z is scrubbed

Kept entries before the first hole stay where they are: `base` is the first ordinal that is rewritten. Move i goes from
`sources[i]` to `base + i`, so with ascending sources a destination never overtakes its source, and a forward copy in place only
overwrites what it has read.

Layers with a sliding window of W entries keep the newest W, whatever the decision says, and these land so that they end where the
kept ones end: the engine masks by physical distance, and the newest W are then the W it sees. What lies before them is stale and
never read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from runtime_service.compaction.decision import KeepDecision, Ordinals
from shared.ids import PageId


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """Move i reads ordinal `sources[i]` and writes ordinal `base + i`."""

    base: int
    sources: Ordinals

    @property
    def end(self) -> int:
        """First ordinal behind what is written."""
        return self.base + len(self.sources)


@dataclass(frozen=True, slots=True, eq=False)
class CompactionPlan:
    """One sequence, one round: of `length` entries those at `kept` survive.

    `moves` by window (None = layers that see everything). `pages` is the table the moves run on; its first `num_pages_kept` stay.
    `copies` are indices into `pages` of shared pages that the round, or the steps after it, will write to: a copy must take their
    place first. `scrub` are the vacated cells of the page where the kept entries end, as ordinals: the mover zeroes them.
    """

    page_size: int
    pages: tuple[PageId, ...]
    length: int
    kept: Ordinals
    moves: dict[int | None, Moves]
    copies: tuple[int, ...]
    num_pages_kept: int
    scrub: range

    @property
    def kept_len(self) -> int:
        return len(self.kept)

    @property
    def pages_kept(self) -> tuple[PageId, ...]:
        return self.pages[: self.num_pages_kept]

    @property
    def pages_freed(self) -> tuple[PageId, ...]:
        return self.pages[self.num_pages_kept :]

    @property
    def indices_owned(self) -> range:
        """Indices into `pages` that nobody else may read: from the first the round writes to the last kept for tokens to come."""
        first = min(self.kept_len, *(moves.base for moves in self.moves.values()))
        return range(first // self.page_size, self.num_pages_kept)

    def with_copies(self, copies: Sequence[PageId]) -> CompactionPlan:
        """The plan with `copies[i]` in the place of the i-th shared page that was to be copied."""
        pages = list(self.pages)
        for index, page in zip(self.copies, copies, strict=True):
            pages[index] = page
        return replace(self, pages=tuple(pages), copies=())

    def check(self, is_shared: Callable[[PageId], bool]) -> None:
        """ValueError unless this plan is within the mover's contract: the last look before bytes move."""
        if not 0 < self.kept_len <= self.length <= len(self.pages) * self.page_size:
            raise ValueError(f"{self.kept_len} of {self.length} entries on {len(self.pages)} pages of {self.page_size}")
        if not self.kept_len <= self.num_pages_kept * self.page_size:
            raise ValueError(f"{self.kept_len} kept entries on {self.num_pages_kept} pages of {self.page_size}")
        for window, moves in self.moves.items():
            self._check_moves("full layers" if window is None else f"layers with window {window}", moves)
        for index in self.indices_owned:
            if is_shared(self.pages[index]):
                raise ValueError(f"page {self.pages[index]} at index {index} would be written to, and another sequence reads it")

    def _check_moves(self, name: str, moves: Moves) -> None:
        sources, destinations = moves.sources, np.arange(moves.base, moves.end)
        if moves.end != self.kept_len or moves.base < 0:
            raise ValueError(f"{name}: moves to {moves.base}..{moves.end} must end where the {self.kept_len} kept entries end")
        if (np.diff(sources) <= 0).any():
            raise ValueError(f"{name}: sources must strictly ascend, got {sources.tolist()[:16]}")
        if len(sources) and not 0 <= sources[0] <= sources[-1] < self.length:
            raise ValueError(f"{name}: sources must lie in 0..{self.length}, got {sources[0]}..{sources[-1]}")
        overtaking = np.flatnonzero(destinations > sources)
        if len(overtaking):
            index = int(overtaking[0])
            raise ValueError(f"{name}: move {index} to ordinal {destinations[index]} would overtake its source {sources[index]}")


def plan_round(
    decision: KeepDecision,
    pages: Sequence[PageId],
    page_size: int,
    *,
    windows: Iterable[int | None],
    reserve: int,
    is_shared: Callable[[PageId], bool],
) -> CompactionPlan:
    """Plan a round. Pages that hold `reserve` entries stay even when fewer survive.

    ValueError, naming both numbers, when something is evicted and a window is larger than what is kept.
    """
    kept_len = len(decision.kept)
    num_pages_kept = min(len(pages), -(-max(kept_len, reserve) // page_size))
    plan = CompactionPlan(
        page_size=page_size,
        pages=tuple(pages),
        length=decision.length,
        kept=decision.kept,
        moves={window: _moves(decision, window) for window in windows},
        copies=(),
        num_pages_kept=num_pages_kept,
        scrub=range(kept_len, min(decision.length, -(-kept_len // page_size) * page_size)),
    )
    return replace(plan, copies=tuple(index for index in plan.indices_owned if is_shared(pages[index])))


def _moves(decision: KeepDecision, window: int | None) -> Moves:
    kept_len, length = len(decision.kept), decision.length
    if window is None or kept_len == length:
        displaced = np.flatnonzero(decision.kept != np.arange(kept_len))
        base = int(displaced[0]) if len(displaced) else kept_len
        return Moves(base, decision.kept[base:])
    if kept_len < window:
        raise ValueError(f"a round that keeps {kept_len} entries would cut the sliding window of {window}; keep at least as many")
    return Moves(kept_len - window, np.arange(length - window, length, dtype=np.int32))

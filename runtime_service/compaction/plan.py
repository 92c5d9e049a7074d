"""What a round does to one sequence's memory: a pure function of the decision and the page table.

    page size 4, pages 7 3 9, 11 entries, kept 0 2 3 9 10

                    7          3          9
    before          0 1 2 3    4 5 6 7    8 9 10 .
    ordered         0 2 3 9    10 z z z              2 -> 1, 3 -> 2, 9 -> 3, 10 -> 4; page 9 is free, z is scrubbed
    hole filling    0 9 2 3    10 z z z              9 -> 1, 10 -> 4

`order[r, o]` is the ordinal of the entry that comes to lie at ordinal o in the heads of row r: the moves and the new map in one.
*Ordered*: `order` is the decision itself, and as its rows ascend, no destination overtakes its source: a forward copy in
place overwrites only what it has read. *Hole filling*: what lies beyond the new length fills, in turn, the holes below it; sources
and destinations are disjoint.

Layers with a sliding window of W entries keep the newest W, whatever the decision says, and these land so that they end where the
kept ones end: the engine masks by physical distance, and the newest W are then the W it sees. What lies before them is stale and
never read. Physical distance means nothing once holes have been filled, so engines with windows take ordered rounds only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from runtime_service.compaction.decision import KeepDecision
from runtime_service.core.entries import Rows
from shared.ids import PageId
from shared.kernels.compaction.modes import Mode


@dataclass(frozen=True, slots=True, eq=False)
class CompactionPlan:
    """One sequence, one round: what `decision` keeps ends up in `order`.

    `rewritten` are the ordinals that moves write to in any layer, ascending; `windows` those of the layers that see only their
    newest entries. `pages` is the table the moves run on; its first `num_pages_kept` stay. `tail` cells behind `length` hold what a
    step in flight writes, and move right behind the kept ones; what is vacated between them and the end of their page, the mover
    zeroes. `copies` are indices into `pages` of shared pages that the round, or the steps after it, will write to: a copy must take
    their place first.
    """

    decision: KeepDecision
    page_size: int
    pages: tuple[PageId, ...]
    tail: int
    mode: Mode
    order: Rows
    rewritten: NDArray[np.intp]
    windows: tuple[int, ...]
    copies: tuple[int, ...]
    num_pages_kept: int

    @property
    def length(self) -> int:
        """Entries before the round."""
        return self.decision.length

    @property
    def kept_len(self) -> int:
        """Entries after it."""
        return int(self.decision.kept.shape[1])

    @property
    def base(self) -> int:
        """First ordinal that is rewritten in any layer, `kept_len` where none is."""
        return int(self.rewritten[0]) if len(self.rewritten) else self.kept_len

    @property
    def pages_kept(self) -> tuple[PageId, ...]:
        return self.pages[: self.num_pages_kept]

    @property
    def pages_freed(self) -> tuple[PageId, ...]:
        return self.pages[self.num_pages_kept :]

    @property
    def indices_owned(self) -> tuple[int, ...]:
        """Indices into `pages` that nobody else may read: where moves write, and from the new end on, where tokens to come go."""
        owned = np.zeros(self.num_pages_kept, dtype=bool)
        owned[self.rewritten // self.page_size] = True
        owned[self.kept_len // self.page_size :] = True
        return tuple(np.flatnonzero(owned).tolist())

    def with_sharing(self, is_shared: Callable[[PageId], bool]) -> CompactionPlan:
        """The plan that copies whichever of its own pages are shared now."""
        return replace(self, copies=tuple(index for index in self.indices_owned if is_shared(self.pages[index])))

    def with_copies(self, copies: Sequence[PageId]) -> CompactionPlan:
        """The plan with `copies[i]` in the place of the i-th shared page that was to be copied."""
        if not copies:
            return self
        pages = list(self.pages)
        for index, page in zip(self.copies, copies, strict=True):
            pages[index] = page
        return replace(self, pages=tuple(pages), copies=())

    def check(self, is_shared: Callable[[PageId], bool]) -> None:
        """ValueError unless this plan is within the mover's contract: the last look before bytes move."""
        if self.length + self.tail > len(self.pages) * self.page_size:
            raise ValueError(f"{self.length} + {self.tail} entries do not fit on {len(self.pages)} pages of {self.page_size}")
        if self.kept_len + self.tail > self.num_pages_kept * self.page_size:
            raise ValueError(
                f"{self.kept_len} + {self.tail} kept entries do not fit on {self.num_pages_kept} pages of {self.page_size}"
            )
        window = max(self.windows, default=0)
        if self.decision.num_evicted and self.kept_len < window:
            raise ValueError(f"a round that keeps {self.kept_len} entries would cut the sliding window of {window}; keep as many")
        self._check_order()
        for index in self.indices_owned:
            if is_shared(self.pages[index]):
                raise ValueError(f"page {self.pages[index]} at index {index} would be written to, and another sequence reads it")

    def _check_order(self) -> None:
        in_order = self.order if self.mode is Mode.ORDERED else np.sort(self.order)
        if in_order.shape != self.decision.kept.shape or (in_order != self.decision.kept).any():
            raise ValueError(f"{self.mode}: what moves must be what is kept, once each; got {self.order.tolist()}")
        if self.mode is Mode.ORDERED:
            return
        if self.windows:
            raise ValueError(f"hole filling is exact where order does not matter; layers with windows of {self.windows} see it")
        row, ordinal = np.nonzero((self.order != np.arange(self.kept_len)) & (self.order < self.kept_len))
        if len(row):
            raise ValueError(
                f"row {row[0]}: a hole must be filled from beyond the new length {self.kept_len}, "
                f"got ordinal {self.order[row[0], ordinal[0]]} for ordinal {ordinal[0]}"
            )


def plan_round(
    decision: KeepDecision,
    pages: Sequence[PageId],
    page_size: int,
    *,
    mode: Mode,
    windows: Iterable[int],
    reserve: int,
    is_shared: Callable[[PageId], bool],
    tail: int = 0,
) -> CompactionPlan:
    """Plan a round. Pages that hold `reserve` entries stay even when fewer survive."""
    kept_len = decision.kept.shape[1]
    windows = tuple(windows)
    order = decision.kept if mode is Mode.ORDERED else fill_holes(decision.kept)
    moved: NDArray[np.bool_] = (order != np.arange(kept_len)).any(axis=0)
    if windows and decision.num_evicted:
        moved[max(0, kept_len - max(windows)) :] = True
    plan = CompactionPlan(
        decision=decision,
        page_size=page_size,
        pages=tuple(pages),
        tail=tail,
        mode=mode,
        order=order,
        rewritten=np.flatnonzero(moved),
        windows=windows,
        copies=(),
        num_pages_kept=min(len(pages), -(-max(kept_len + tail, reserve) // page_size)),
    )
    return plan.with_sharing(is_shared)


def fill_holes(kept: Rows) -> Rows:
    """The order after hole filling, of each row: lowest survivor beyond the new length into the lowest hole below it."""
    rows, length = kept.shape
    staying = np.zeros((rows, length + 1), dtype=bool)
    np.put_along_axis(staying, np.minimum(kept, length), True, axis=1)
    order = np.broadcast_to(np.arange(length, dtype=np.int32), kept.shape).copy()
    order[~staying[:, :length]] = kept[kept >= length]  # a row has as many of the ones as of the others
    return order

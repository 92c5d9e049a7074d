"""The cache of a speculative draft: the target's entries in the draft's own layers and heads, on pages of its own.

Entry o is the same token in both, always: the draft's cache grows with the target's, and rounds move it by the target's decision.
What the draft has written ahead of the target moves with it, right behind what is kept.
"""

from __future__ import annotations

from collections.abc import Collection

from runtime_service.compaction.accounting import evidence_of
from runtime_service.compaction.decision import KeepDecision
from runtime_service.compaction.plan import CompactionPlan, plan_round
from runtime_service.core.evidence import CompactionEvidence
from runtime_service.core.sequence import Sequence
from runtime_service.kv.allocator import PageAllocator
from runtime_service.kv.pool import KVPool
from shared.errors import InternalError
from shared.ids import PageId
from shared.kernels.compaction.modes import Mode


class DraftCache:
    """Follows the lifecycle of up to `max_sequences` sequences; holds cells for `max_ahead` entries ahead of the target's.

    ValueError unless the pool holds them all at full length: a draft never makes a target wait for a page. `evidence` sums over
    the draft's moves; their time is part of the target's rounds.
    """

    def __init__(self, pool: KVPool, allocator: PageAllocator, max_sequences: int, max_ahead: int = 0) -> None:
        needed = max_sequences * pool.spec.max_pages
        if allocator.capacity < needed:
            raise ValueError(
                f"{max_sequences} sequences of {pool.spec.max_len} entries take {needed} pages of {pool.spec.page_size}; "
                f"the draft's pool has {allocator.capacity}"
            )
        self.pool = pool
        self.allocator = allocator
        self.max_ahead = max_ahead
        self.evidence = CompactionEvidence()
        self._pages: dict[Sequence, list[PageId]] = {}
        self._ahead: dict[Sequence, int] = {}

    def pages(self, sequence: Sequence) -> list[PageId]:
        """Where its entries lie, those ahead included."""
        return self._pages[sequence]

    def note_ahead(self, sequence: Sequence, count: int) -> None:
        """The draft has written `count` entries behind those of the target; ValueError above `max_ahead`."""
        if not 0 <= count <= self.max_ahead:
            raise ValueError(f"a draft may be 0 to {self.max_ahead} entries ahead, got {count}")
        self._ahead[sequence] = count

    # ---- the lifecycle ----

    def started(self, sequence: Sequence) -> None:
        self._pages[sequence], self._ahead[sequence] = [], 0

    def forked(self, parent: Sequence, child: Sequence) -> None:
        """Full pages are shared; the rest, where the child writes next, is copied."""
        pages = self._pages[parent]
        num_full = parent.physical_len // self.pool.spec.page_size
        own = self._allocate(len(pages) - num_full)
        for source, copy in zip(pages[num_full:], own, strict=True):
            self.pool.copy_page(source, copy)
        self._pages[child] = [*self.allocator.share(pages[:num_full]), *own]
        self._ahead[child] = self._ahead[parent]

    def context_ended(self, sequence: Sequence) -> None:
        """Nothing is kept of the context but its entries."""

    def step_ended(self, alive: Collection[Sequence]) -> None:
        """Take pages for what the target has computed and for what the draft may write ahead of it."""
        spec = self.pool.spec
        for sequence in alive:
            pages = self._pages[sequence]
            cells = min(sequence.physical_len + self.max_ahead, spec.max_len)
            pages += self._allocate(max(0, spec.pages_for(cells) - len(pages)))

    def ended(self, sequence: Sequence) -> None:
        del self._ahead[sequence]
        self.allocator.release(self._pages.pop(sequence))

    # ---- rounds ----

    def plan(self, sequence: Sequence, decision: KeepDecision, mode: Mode) -> CompactionPlan:
        """The target's decision on the draft's pages."""
        spec = self.pool.spec
        return plan_round(
            decision,
            self._pages[sequence],
            spec.page_size,
            mode=mode,
            windows=spec.windows,
            reserve=min(decision.kept.shape[1] + self.max_ahead, spec.max_len),
            is_shared=self.allocator.is_shared,
            tail=self._ahead[sequence],
        )

    def compact(self, sequence: Sequence, plan: CompactionPlan) -> None:
        """The moves of `plan` have been launched."""
        dropped = set(self._pages[sequence]).difference(plan.pages_kept)
        self._pages[sequence] = list(plan.pages_kept)
        self.evidence += evidence_of(plan, self.pool.spec, self.allocator.release(dropped), duration_s=0.0)

    def _allocate(self, count: int) -> list[PageId]:
        pages = self.allocator.try_allocate(count)
        if pages is None:
            raise InternalError(f"the draft's pool, sized for every sequence, has {self.allocator.num_free} of {count} pages left")
        return pages

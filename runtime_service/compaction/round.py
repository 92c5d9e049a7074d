"""A compaction round, the transaction: decide, plan, move, commit.

    1  decide   what each sequence of the cohort keeps; after a preemption, what it kept the first time
    2  plan     moves and pages, pure, checked against the mover's contract
    3  move     bytes, in place; shared pages that would be written are copied first
    4  commit   lengths, table and page release of the whole cohort

Steps 1 to 3 change no mapping. If one raises, every sequence still has the pages and lengths it had; from step 3 on its bytes are
undefined, so the caller gives the cohort up or has it recomputed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from runtime_service.compaction.decision import KeepDecision, keep_best
from runtime_service.compaction.executor import RoundExecutor
from runtime_service.compaction.plan import CompactionPlan, plan_round
from runtime_service.compaction.policy import KVView, Policy
from runtime_service.compaction.trigger import reserve
from runtime_service.core.evidence import CompactionEvidence
from runtime_service.core.sequence import Sequence as KVSequence
from runtime_service.kv.allocator import PageAllocator
from runtime_service.kv.pool import KVPool
from shared.ids import Ordinal, PageId


class Compactor:
    """Rounds on one pool. `evidence` sums over all of them."""

    def __init__(
        self,
        pool: KVPool,
        allocator: PageAllocator,
        policies: Mapping[str, Policy],
        max_sequences: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._pool = pool
        self._allocator = allocator
        self._policies = policies
        self._executor = RoundExecutor(pool, max_sequences)
        self._clock = clock
        self.evidence = CompactionEvidence()

    def run(self, cohort: Sequence[KVSequence]) -> bool:
        """Run one round. False, with nothing changed, when no page is free for a copy of a shared page."""
        started = self._clock()
        plans = [self._plan(sequence) for sequence in cohort]
        copies = self._allocator.try_allocate(sum(len(plan.copies) for plan in plans))
        if copies is None:
            return False
        try:
            plans = self._copy_shared(plans, copies)
            self._move(plans)
        except BaseException:
            self._allocator.release(copies)
            raise
        self._commit(cohort, plans, (self._clock() - started) / len(cohort))
        return True

    def decide(self, sequence: KVSequence) -> KeepDecision:
        if sequence.is_replaying:
            return KeepDecision(sequence.physical_len, np.asarray(sequence.remembered_round(), dtype=np.int32))
        compaction = sequence.request.compaction
        assert compaction is not None, sequence
        scores = self._policies[compaction.policy].score(KVView(sequence, self._pool))
        return keep_best(scores, compaction.budget, compaction.sinks)

    def _plan(self, sequence: KVSequence) -> CompactionPlan:
        decision = self.decide(sequence)
        return plan_round(
            decision,
            sequence.pages,
            self._pool.spec.page_size,
            windows=[group.window for group in self._pool.spec.groups],
            reserve=reserve(sequence, len(decision.kept)),
            is_shared=self._allocator.is_shared,
        )

    def _copy_shared(self, plans: Sequence[CompactionPlan], copies: Sequence[PageId]) -> list[CompactionPlan]:
        remaining = iter(copies)
        owned = []
        for plan in plans:
            own = [next(remaining) for _ in plan.copies]
            for index, page in zip(plan.copies, own, strict=True):
                self._pool.copy_page(plan.pages[index], page)
            owned.append(plan.with_copies(own))
        return owned

    def _move(self, plans: Sequence[CompactionPlan]) -> None:
        for plan in plans:
            plan.check(self._allocator.is_shared)
        self._executor.execute(plans)

    def _commit(self, cohort: Sequence[KVSequence], plans: Sequence[CompactionPlan], duration_s: float) -> None:
        for sequence, plan in zip(cohort, plans, strict=True):
            was_replaying = sequence.is_replaying
            dropped = sequence.compact([Ordinal(o) for o in plan.kept.tolist()], plan.pages_kept)
            evidence = self._evidence(plan, self._allocator.release(dropped), duration_s)
            self.evidence += evidence
            if not was_replaying:
                sequence.evidence += evidence

    def _evidence(self, plan: CompactionPlan, pages_freed: int, duration_s: float) -> CompactionEvidence:
        rows = {group: len(group.layers) * len(plan.moves[group.window].sources) for group in self._pool.spec.groups}
        return CompactionEvidence(
            rounds=1,
            tokens_evicted=plan.length - plan.kept_len,
            rows_moved=sum(rows.values()),
            bytes_moved=sum(count * group.token_bytes // len(group.layers) for group, count in rows.items()),
            pages_freed=pages_freed,
            duration_s=duration_s,
        )

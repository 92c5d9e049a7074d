"""A compaction round, the transaction: decide, plan, move, commit.

    1  decide   what each sequence of the cohort keeps; after a preemption, what it kept the first time
    2  plan     moves and pages, pure, checked against the mover's contract; for a draft's cache, by the same decision
    3  move     bytes, in place; shared pages that would be written are copied first, or no longer offered to requests to come
    4  commit   lengths, table and page release of the whole cohort

Steps 1 to 3 change no mapping. If one fails, every sequence still has the pages and lengths it had, and RoundFailed names those
that cannot go on: in steps 1 and 2 the one whose keys are no numbers, or whose policy raises; from step 3 on, where bytes are
undefined, the cohort. The others may have their round without them.

On a GPU moves are launched, not awaited, and an event is recorded behind them. The commit is in stream order: whatever is launched
by the new lengths and tables runs behind the event. Pages that come free, in this round or because a sequence of it is preempted
or cancelled while the moves run, change hands only when the event has passed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from runtime_service.compaction.accounting import evidence_of
from runtime_service.compaction.decision import KeepDecision, keep_best
from runtime_service.compaction.draft import DraftCache
from runtime_service.compaction.executor import RoundExecutor
from runtime_service.compaction.plan import CompactionPlan, plan_round
from runtime_service.compaction.policy import KVView, Policy
from runtime_service.compaction.trigger import reserve
from runtime_service.core.evidence import CompactionEvidence
from runtime_service.core.params import CompactionParams
from runtime_service.core.request import GenerationRequest
from runtime_service.core.sequence import Sequence as KVSequence
from runtime_service.kv.allocator import PageAllocator
from runtime_service.kv.page_copies import PageCopies
from runtime_service.kv.pool import KVPool
from shared.ids import PageId
from shared.kernels.compaction.modes import Mode


@dataclass(frozen=True, slots=True)
class _Cache:
    """Where plans are carried out: the target's memory, or its draft's."""

    pool: KVPool
    allocator: PageAllocator
    copies: PageCopies


class RoundFailed(Exception):
    """`sequences` of the cohort cannot go on; the message says why."""

    def __init__(self, sequences: Sequence[KVSequence], cause: Exception) -> None:
        super().__init__(f"a compaction round failed: {type(cause).__name__}: {cause}")
        self.sequences = tuple(sequences)


@contextmanager
def _at_the_cost_of(sequences: Sequence[KVSequence]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever a policy or a mover raises costs those it worked for, and nobody else
        raise RoundFailed(sequences, error) from error


class Compactor:
    """Rounds on one pool, and on the pool of its draft if there is one. `evidence` sums over the target's rounds."""

    def __init__(
        self,
        pool: KVPool,
        allocator: PageAllocator,
        policies: Mapping[str, Policy],
        max_sequences: int,
        draft: DraftCache | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._pool = pool
        self._allocator = allocator
        self._policies = policies
        self._draft = draft
        self._caches = [_Cache(pool, allocator, PageCopies(pool))]
        if draft is not None:
            self._caches.append(_Cache(draft.pool, draft.allocator, PageCopies(draft.pool)))
        max_tail = 0 if draft is None else draft.max_ahead
        self._executor = RoundExecutor([cache.pool for cache in self._caches], max_sequences, max_tail)
        self._clock = clock
        self.evidence = CompactionEvidence()

    def prepare(self, request: GenerationRequest) -> None:
        """Bind what the request's rounds need, so that none of them does. A request that never outgrows its budget has none."""
        params = request.compaction
        if params is not None and request.max_entries > params.budget:
            self._executor.prepare(params.mode, self._policies[params.policy].rows, params.budget)

    def run(self, cohort: Sequence[KVSequence]) -> bool:
        """Run one round. False, with no mapping changed, when no page is free for a copy of what other sequences hold too.

        RoundFailed, see above.
        """
        started = self._clock()
        plans = self._plan(cohort)
        plans[0] = self._afford_copies(plans[0])
        with ExitStack() as undo:
            copies = []
            for cache, planned in zip(self._caches, plans, strict=True):
                pages = cache.allocator.try_allocate(sum(len(plan.copies) for plan in planned))
                if pages is None:
                    return False
                undo.callback(cache.allocator.release, pages)
                copies.append(pages)
            with _at_the_cost_of(cohort):
                plans = self._move(plans, copies)
            undo.pop_all()
        with _at_the_cost_of(cohort):
            self._commit(cohort, plans, (self._clock() - started) / len(cohort))
        return True

    def _score(self, cohort: Sequence[KVSequence]) -> dict[KVSequence, NDArray[np.float32]]:
        """Of those with something to decide. All are scored before any score is waited for."""
        fresh = [sequence for sequence in cohort if not sequence.is_replaying]
        scored = []
        for sequence in fresh:
            with _at_the_cost_of([sequence]):
                scored.append(self._policy(sequence).score(KVView(sequence, self._pool)))
        with _at_the_cost_of(fresh):
            return dict(zip(fresh, _on_host(scored), strict=True))

    def _decide(self, sequence: KVSequence, scores: Mapping[KVSequence, NDArray[np.float32]]) -> KeepDecision:
        params, rows = _params(sequence), self._policy(sequence).rows
        if sequence in scores:
            return keep_best(scores[sequence], sequence.positions, params.budget, params.sinks, rows)
        return KeepDecision(sequence.physical_len, sequence.remembered_round(), rows)

    def _policy(self, sequence: KVSequence) -> Policy:
        return self._policies[_params(sequence).policy]

    def _plan(self, cohort: Sequence[KVSequence]) -> list[list[CompactionPlan]]:
        """A list of plans for each cache."""
        scores = self._score(cohort)
        plans: list[list[CompactionPlan]] = [[] for _ in self._caches]
        for sequence in cohort:
            with _at_the_cost_of([sequence]):
                decided = (sequence, self._decide(sequence, scores), _params(sequence).mode)
                plans[0].append(self._target_plan(*decided))
                if self._draft is not None:
                    plans[1].append(self._draft.plan(*decided))
        return plans

    def _target_plan(self, sequence: KVSequence, decision: KeepDecision, mode: Mode) -> CompactionPlan:
        spec = self._pool.spec
        return plan_round(
            decision,
            sequence.pages,
            spec.page_size,
            mode=mode,
            windows=spec.windows,
            reserve=reserve(sequence, decision.kept.shape[1]),
            is_shared=self._allocator.is_shared,
        )

    def _afford_copies(self, plans: list[CompactionPlan]) -> list[CompactionPlan]:
        """Where pages for copies are wanting, what is to be written is withdrawn, and only what other sequences hold is copied."""
        if sum(len(plan.copies) for plan in plans) <= self._allocator.num_free:
            return plans
        for plan in plans:
            self._allocator.withdraw(plan.pages[index] for index in plan.copies)
        return [plan.with_sharing(self._allocator.is_shared) for plan in plans]

    def _move(self, plans: Sequence[Sequence[CompactionPlan]], copies: Sequence[Sequence[PageId]]) -> list[list[CompactionPlan]]:
        """Copy what is shared, check, launch. Returns the plans on the pages they ran on."""
        try:
            owned = [
                _copy_shared(cache.copies, planned, pages)
                for cache, planned, pages in zip(self._caches, plans, copies, strict=True)
            ]
            for cache, planned in zip(self._caches, owned, strict=True):
                for plan in planned:
                    plan.check(cache.allocator.is_shared)
            self._executor.execute(owned)
        finally:
            for cache in self._caches:
                cache.allocator.hold_back(cache.pool.fence())
        return owned

    def _commit(self, cohort: Sequence[KVSequence], plans: Sequence[Sequence[CompactionPlan]], duration_s: float) -> None:
        for sequence, plan, *draft_plans in zip(cohort, *plans, strict=True):
            was_replaying = sequence.is_replaying
            beyond = set(plan.pages_freed)
            replaced = [page for page in sequence.compact(plan.order, plan.pages_kept) if page not in beyond]
            pages_freed = self._allocator.release(plan.pages_freed)
            self._allocator.release(replaced)  # no gain: each was paid for with its copy
            evidence = evidence_of(plan, self._pool.spec, pages_freed, duration_s)
            self.evidence += evidence
            if not was_replaying:
                sequence.evidence += evidence
            if self._draft is not None:
                self._draft.compact(sequence, *draft_plans)


def _on_host(scores: Sequence[torch.Tensor]) -> list[NDArray[np.float32]]:
    """Those on a device come over in one copy."""
    apart = [tensor for tensor in scores if tensor.device.type != "cpu"]
    if apart:
        flat = torch.cat([tensor.flatten() for tensor in apart]).cpu()
        arrived = iter(torch.split(flat, [tensor.numel() for tensor in apart]))
    return [(tensor if tensor.device.type == "cpu" else next(arrived).view(tensor.shape)).numpy() for tensor in scores]


def _params(sequence: KVSequence) -> CompactionParams:
    compaction = sequence.request.compaction
    assert compaction is not None, sequence
    return compaction


def _copy_shared(copies: PageCopies, plans: Sequence[CompactionPlan], pages: Sequence[PageId]) -> list[CompactionPlan]:
    """Copy on write to `pages`: the plans on pages that, where they are written to, are nobody else's."""
    shared = [plan.pages[index] for plan in plans for index in plan.copies]
    copies.run(list(zip(shared, pages, strict=True)))
    remaining = iter(pages)
    return [plan.with_copies([next(remaining) for _ in plan.copies]) for plan in plans]

"""A scheduler with a make-believe engine: batches are carried out by moving counters."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from runtime_service.core.batch import PressureRound, ScheduledBatch
from runtime_service.core.params import CompactionParams
from runtime_service.core.sequence import Sequence, Status
from runtime_service.kv.allocator import PageAllocator
from runtime_service.kv.prefix_cache import PrefixCache
from runtime_service.scheduler.scheduler import Scheduler
from shared.kv_spec import DType, KVCacheSpec, LayerGroup, Layout
from shared.profiles import ProfileSet, parse_profile
from tests.support.serving import request


class Bench:
    """Pages of `page_size` entries; `num_pages` can be owned. `step` schedules once and carries the result out."""

    def __init__(
        self,
        num_pages: int,
        *,
        page_size: int = 4,
        max_len: int = 400,
        layout: Layout = Layout.PAGED,
        profiles: tuple[str, ...] = ("decode=4x1", "prefill=2x8"),
        prefix_caching: bool = False,
    ) -> None:
        group = LayerGroup(layers=(0,), kv_heads=1, head_dim=2, dtype=DType.FLOAT32)
        page_size = max_len if layout is Layout.LINEAR else page_size
        self.spec = KVCacheSpec((group,), layout, page_size, max_len)
        self.allocator = PageAllocator(num_pages + 1)
        self.prefixes = PrefixCache(self.allocator, page_size, enabled=prefix_caching)
        self.scheduler = Scheduler(self.spec, ProfileSet(tuple(map(parse_profile, profiles))), self.allocator, self.prefixes)
        self.arrivals = itertools.count()

    def add(self, prompt: int, max_tokens: int = 100, *, compaction: CompactionParams | None = None, priority: int = 0) -> Sequence:
        wanted = request(range(prompt), max_tokens, compaction=compaction, priority=priority)
        sequence = Sequence(wanted, 0, next(self.arrivals))
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> ScheduledBatch | PressureRound | None:
        work = self.scheduler.schedule()
        if isinstance(work, PressureRound):
            self.compact(work.sequence)
        elif work is not None:
            for sequence in work.sequences:
                assert sequence.physical_len + work.query_len <= len(sequence.pages) * self.spec.page_size
                sequence.advance(work.query_len)
                self.prefixes.publish(sequence)
                if sequence.remaining == 0:
                    sequence.append(0)
                    if sequence.num_generated == sequence.request.stop.max_tokens:
                        self.scheduler.release(sequence)
                        continue
                if sequence.round_is_due:
                    self.compact(sequence)
        self.check()
        return work

    def compact(self, sequence: Sequence) -> None:
        budget = sequence.request.compaction.budget
        kept = np.arange(sequence.physical_len - budget, sequence.physical_len, dtype=np.int32)[None]
        if sequence.is_replaying:
            kept = sequence.remembered_round()
        needed = min(kept.shape[1] + sequence.remaining, sequence.request.max_physical)
        self.allocator.release(sequence.compact(kept, sequence.pages[: self.spec.pages_for(needed)]))

    def check(self) -> None:
        """Pages are owned by running sequences and nothing else; a page that two of them own, or that is published, is full."""
        self.allocator.check_integrity()
        owned = Counter(page for sequence in self.scheduler.running for page in sequence.pages)
        assert len(owned) == self.allocator.num_used
        for sequence in self.scheduler.running:
            for index, page in enumerate(sequence.pages):
                assert self.allocator.is_shared(page) or owned[page] == 1
                assert not self.allocator.is_shared(page) or (index + 1) * self.spec.page_size <= sequence.physical_len
        assert all(sequence.pages == [] for sequence in self.scheduler.waiting)
        assert all(sequence.status is Status.RUNNING for sequence in self.scheduler.running)

    def finish(self, most_steps: int = 5000) -> int:
        for step in range(most_steps):
            if self.step() is None:
                assert not len(self.scheduler.waiting)
                assert self.allocator.num_used == 0
                return step
        raise AssertionError(f"no end after {most_steps} steps")


@pytest.fixture
def bench() -> type[Bench]:
    return Bench

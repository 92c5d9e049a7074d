"""Continuous batching: which sequences take the next step, and on whose pages.

    waiting --admit or fork--> running --release--> finished
       ^--------preempt-----------'

Order. Sequences rank by priority, then arrival. Admission is strictly in rank order: nobody overtakes a head that does not fit
yet. Pages for everything a sequence knows are taken at admission, so prefill never runs dry half-way; decoding takes a page when
it crosses into one.

Prefixes. A sequence starts from the pages that others have filled with its first tokens, and looks again before its first chunk,
for those who were admitted with it may be ahead of it by then.

No page left. First an early compaction round of whoever it frees most for; then the lowest-ranked running sequence gives all its
pages back and waits to be recomputed. The highest-ranked one is never the victim while another runs, and alone it fits (checked
at submission), so it always finishes: no livelock.

Turns. One step is one engine call of one profile. Decode and prefill alternate while both have work.
"""

from __future__ import annotations

from runtime_service.compaction.lifecycle import Lifecycles
from runtime_service.compaction.trigger import relief
from runtime_service.core.batch import PressureRound, ScheduledBatch
from runtime_service.core.sequence import Sequence, Status
from runtime_service.kv.allocator import PageAllocator
from runtime_service.kv.prefix_cache import PrefixCache
from runtime_service.scheduler.budget import chunk_len, pages_to_grow, pages_to_start
from runtime_service.scheduler.queues import WaitingQueue
from shared.ids import PageId
from shared.kv_spec import KVCacheSpec
from shared.profiles import Phase, ProfileSet


class Scheduler:
    """Owns the queue, the running set and, through them, every page a sequence holds. One thread."""

    def __init__(
        self,
        spec: KVCacheSpec,
        profiles: ProfileSet,
        allocator: PageAllocator,
        prefixes: PrefixCache,
        lifecycles: Lifecycles | None = None,
    ) -> None:
        self._spec = spec
        self._profiles = profiles
        self._allocator = allocator
        self._prefixes = prefixes
        self._max_running = profiles[Phase.DECODE].batch.max
        self._last_phase = Phase.DECODE
        self._lifecycles = lifecycles or Lifecycles()
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []  # in rank order
        self.num_preemptions = 0

    def add(self, sequence: Sequence) -> None:
        self.waiting.add(sequence)

    def schedule(self) -> ScheduledBatch | PressureRound | None:
        """The next step, or None when nothing runs. Admits and preempts on the way."""
        self._admit()
        turns = (Phase.PREFILL, Phase.DECODE) if self._last_phase is Phase.DECODE else (Phase.DECODE, Phase.PREFILL)
        for phase in turns:
            step = self._prefill() if phase is Phase.PREFILL else self._decode()
            if step is not None:
                self._last_phase = phase
                return step
        return None

    def fork(self, parent: Sequence, child: Sequence) -> list[tuple[PageId, PageId]] | None:
        """Run `child`, which has never run, on what `parent` has computed of their common prompt.

        Full pages are shared; the page the next token goes to must be the child's own, so it gets a new one. Returns the copies to
        make before the next step, as (source, target); None, with nothing changed, when no place or no page is free.
        """
        num_full, num_cells = divmod(parent.physical_len, self._spec.page_size)
        num_copies = 1 if num_cells else 0
        growth = pages_to_grow(self.running, self._spec)
        if len(self.running) >= self._max_running or num_copies + growth > self._allocator.num_free:
            return None
        own = self._allocator.try_allocate(num_copies)
        assert own is not None, (num_copies, self._allocator.num_free)
        self.waiting.discard(child)
        child.fork(parent, [*self._allocator.share(parent.pages[:num_full]), *own])
        self._lifecycles.forks(parent, child)
        self._prefixes.fork(parent, child)
        self._add_running(child)
        return [(parent.pages[num_full], page) for page in own]

    def preempt(self, sequence: Sequence) -> None:
        """Give the pages of a running sequence back; it waits, in its old place, to be recomputed."""
        self.running.remove(sequence)
        self._lifecycles.ends(sequence)
        self._allocator.release(sequence.preempt())
        self.waiting.add(sequence)
        self.num_preemptions += 1

    def release(self, sequence: Sequence) -> None:
        """The one end of every sequence, whatever ended it: out of its queue, its pages back. Idempotent."""
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        else:
            self.waiting.discard(sequence)
        self._lifecycles.ends(sequence)
        self._prefixes.forget(sequence)
        self._allocator.release(sequence.finish())

    def _admit(self) -> None:
        while (head := self.waiting.head) is not None and len(self.running) < self._max_running:
            if head.unseen:
                return  # preempted with a token on its way, which it cannot be recomputed without
            needed, found = pages_to_start(head, self._spec), self._prefixes.find(head)
            taken = needed - sum(self._allocator.is_owned(page) for page in found)
            if taken + pages_to_grow(self.running, self._spec) > self._allocator.num_free:
                return
            self.waiting.discard(head)
            head.start()
            self._add_running(head)  # before anything that may fail: it is always in one place, where it can be ended
            self._resume(head, found)
            pages = self._allocator.try_allocate(needed - len(found))
            assert pages is not None, (needed, found, self._allocator.num_free)
            head.hold(pages)

    def _resume(self, sequence: Sequence, found: list[PageId]) -> None:
        """Go on from `found`, and give up what the sequence held in their place."""
        if found:
            self._allocator.release(sequence.resume(self._allocator.share(found), self._spec.page_size))

    def _add_running(self, sequence: Sequence) -> None:
        self.running.append(sequence)
        self.running.sort(key=lambda s: s.rank)

    def _prefill(self) -> ScheduledBatch | None:
        """The first in rank decides the chunk; others that can take as many tokens ride along, so no row is padded."""
        profile = self._profiles[Phase.PREFILL]
        for sequence in self.running:
            if sequence.remaining > 1 and not sequence.has_stepped:
                self._resume(sequence, self._prefixes.find(sequence))
        chunks = {s: chunk_len(s, profile) for s in self.running if s.remaining > 1}
        if not chunks:
            return None
        length = next(iter(chunks.values()))
        riders = [s for s, chunk in chunks.items() if chunk >= length]
        return ScheduledBatch(profile.name, length, tuple(riders[: profile.batch.max]))

    def _decode(self) -> ScheduledBatch | PressureRound | None:
        """One token of everybody who gets a cell for it."""
        decoding = [s for s in self.running if s.remaining == 1]
        for sequence in decoding:
            while sequence.status is Status.RUNNING and not self._has_cell(sequence):
                pages = self._allocator.try_allocate(1)
                if pages is not None:
                    sequence.hold(pages)
                elif (relieved := relief(self.running, self._spec)) is not None:
                    return PressureRound(relieved)
                else:
                    self.preempt(self.running[-1])
        batch = tuple(s for s in decoding if s.status is Status.RUNNING)
        return ScheduledBatch(Phase.DECODE, 1, batch) if batch else None

    def _has_cell(self, sequence: Sequence) -> bool:
        return sequence.physical_len < len(sequence.pages) * self._spec.page_size

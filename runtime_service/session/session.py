"""One loaded engine being served: its pool, pages, scheduler and rounds, step by step; its live requests are in live.py.

A step, on the loop's thread:

    end what nobody wants any more -> schedule -> run -> sample -> emit -> maybe compact

Where the engine runs on a device, the host stays one step ahead of what it has seen: a step's tokens are drawn on the device, the
next step is launched on them, and only then are they waited for and passed on. A row whose sequence has ended meanwhile was
computed for nothing; its cells are its own until the step that writes them is behind, because everything runs in stream order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import structlog
import torch
from tokenizers import Tokenizer

from runtime_service.compaction.draft import DraftCache
from runtime_service.compaction.lifecycle import Lifecycles
from runtime_service.compaction.registry import POLICIES, check_policy
from runtime_service.compaction.round import Compactor, RoundFailed
from runtime_service.compaction.trigger import due
from runtime_service.core.batch import PressureRound, ScheduledBatch
from runtime_service.core.request import GenerationRequest
from runtime_service.core.sequence import Sequence, Status
from runtime_service.device_sampling import needs_host
from runtime_service.engine.engine import Engine, EngineInputs
from runtime_service.kv.allocator import PageAllocator
from runtime_service.kv.pool import KVPool
from runtime_service.kv.prefix_cache import PrefixCache, can_share
from runtime_service.scheduler.budget import Capacity, check_request
from runtime_service.scheduler.scheduler import Scheduler
from runtime_service.session.flight import Flight
from runtime_service.session.generation import Generation, Sample
from runtime_service.session.inputs import build_inputs
from runtime_service.session.live import LiveRequests
from runtime_service.session.load import EngineLoad
from runtime_service.session.statistics import Statistics
from runtime_service.session.turnover import Turnover
from runtime_service.streaming.vocabulary import Vocabulary
from shared.errors import EngineIncompatible, InternalError, QuireError
from shared.kernels.upload import select_rows
from shared.profiles import Phase, ProfileSet

_log = structlog.get_logger()


class EngineSession:
    """`check` may be called from any thread; everything else belongs to the loop's.

    `on_end` is called once for every admitted generation, before its last event and with its pages released; `deliver` whenever
    it is about to wait for the device, which is when readers of events should do their work. `draft` is the cache
    of a speculative draft, which rounds keep in step with the engine's. `prefix_caching` lets requests go on from what others have
    computed, where they can share pages; not beside a draft's cache, which would have nothing of what a sequence skips.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        tokenizer: Tokenizer,
        num_pages: int,
        *,
        clock: Callable[[], float],
        on_end: Callable[[Generation], None],
        deliver: Callable[[], None],
        draft: DraftCache | None = None,
        prefix_caching: bool = True,
    ) -> None:
        manifest = engine.manifest
        _check_profiles(manifest.profiles)
        self.name = name
        self.model = manifest.model
        self.vocabulary = Vocabulary(tokenizer)
        self.pool = KVPool(manifest.cache, num_pages, manifest.target.device)
        self.allocator = PageAllocator(num_pages)
        self.lifecycles = Lifecycles([] if draft is None else [draft])
        shares = prefix_caching and draft is None and can_share(manifest.cache)
        self.prefixes = PrefixCache(self.allocator, manifest.cache.page_size, enabled=shares)
        self.scheduler = Scheduler(manifest.cache, manifest.profiles, self.allocator, self.prefixes, self.lifecycles)
        self.compactor = Compactor(self.pool, self.allocator, POLICIES, manifest.profiles[Phase.DECODE].batch.max, draft)
        self.statistics = Statistics(Turnover(manifest.profiles[Phase.DECODE].batch.max))
        self.requests = LiveRequests(name, self.allocator, self.scheduler, self.statistics, clock=clock, on_end=on_end)
        self._capacity = Capacity(manifest.cache, self.allocator.capacity, self.model.vocab_size, self.model.max_position)
        self._draft_spec = None if draft is None else draft.pool.spec
        self._engine = engine
        self._clock = clock
        self._deliver = deliver
        self._flight: Flight | None = None

    def check(self, request: GenerationRequest) -> None:
        """FieldOutOfRange or KVExhausted, with the numbers, for a request that this engine can never run."""
        if request.compaction is not None:
            check_policy(request.compaction, self._engine.manifest, self._draft_spec)
        check_request(request, self._capacity)

    def admit(self, generation: Generation) -> None:
        """Let a checked request wait for its first step; what its rounds need is allocated here."""
        self.requests.admit(generation)
        self.compactor.prepare(generation.request)
        self.scheduler.add(generation.samples[0].sequence)

    def step(self) -> bool:
        """One engine call, or one round to make room for it. False when there was nothing to do."""
        self.requests.end_unwanted()
        work = self.scheduler.schedule()
        match work:
            case None:
                return self._land()
            case PressureRound():
                # What is in flight may end sequences, and make the round needless.
                if not self._land():
                    self._compact([work.sequence])
            case ScheduledBatch():
                self._run(work)
        self.statistics.steps += 1
        return True

    def end_running(self, error: QuireError) -> None:
        """A step failed, and with it what took part in it; what only waits is not touched. All of it, if nothing runs.

        What was launched before may have failed as well: so its tokens are lost, to a sequence that has been preempted since, too.
        """
        self.allocator.withdraw_all()
        flight, self._flight = self._flight, None
        running = [self.requests.sample_of(sequence) for sequence in self.scheduler.running]
        taking_part = running + (flight.samples if flight else [])
        lost = {chosen.generation: None for chosen in taking_part if chosen.sequence.status is not Status.FINISHED}
        for generation in list(lost or self.requests):
            self.requests.end(generation, error)

    def shut(self) -> None:
        """Give the engine's memory back. No generation may be alive."""
        assert not self.requests, list(self.requests)
        self._flight = None
        self._engine.close()

    @property
    def is_ahead(self) -> bool:
        """A step has been launched whose tokens nobody has seen."""
        return self._flight is not None

    def load(self) -> EngineLoad:
        """What is going on, and the sums so far: consistent between two steps."""
        waiting = sum(generation.times.started is None for generation in self.requests)
        return self.statistics.read(
            self.name,
            self.allocator,
            requests_waiting=waiting,
            requests_running=len(self.requests) - waiting,
            preemptions=self.scheduler.num_preemptions,
            compaction=self.compactor.evidence,
        )

    # ---- the parts of a step ----

    def _run(self, batch: ScheduledBatch) -> None:
        self._note_start(batch.sequences)
        self.lifecycles.step_begins(batch.sequences)
        logits = self._engine.run(self._inputs(batch), self.pool)
        for sequence in batch.sequences:
            sequence.advance(batch.query_len)
            self.prefixes.publish(sequence)
        self.lifecycles.step_ends(batch.sequences)
        self.requests.end_unwanted()  # a cancel that came during the step wins over the step's result
        flight = self._take_off(batch, logits)
        self._land()
        self._flight = flight
        if flight.drawn is None:
            self._land()
        self._compact(due(self.scheduler.running))

    def _inputs(self, batch: ScheduledBatch) -> EngineInputs:
        inputs = build_inputs(batch, self.pool.spec)
        return inputs if self._flight is None else self._flight.give_ids(inputs, batch.sequences)

    def _note_start(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            generation = self.requests.sample_of(sequence).generation
            generation.note_pages()
            if generation.times.started is None:
                generation.start(self._clock(), cached_tokens=sequence.reused)
                self.statistics.note_start(generation, looked_up=self.prefixes.enabled)

    def _take_off(self, batch: ScheduledBatch, logits: torch.Tensor) -> Flight:
        """The samples that get a token from this step: those whose last token was computed, and their siblings."""
        drawn: list[tuple[int, Sample]] = []
        for row, sequence in enumerate(batch.sequences):
            if sequence.status is Status.RUNNING and sequence.remaining == 0:
                computed = self.requests.sample_of(sequence)
                drawn += [(row, chosen) for chosen in (computed, *self._fork(computed))]
        samples = [chosen for _, chosen in drawn]
        ahead = self._engine.runs_ahead and not any(needs_host(chosen.sampler) for chosen in samples)
        return Flight.take_off(samples, select_rows(logits, [row for row, _ in drawn]), ahead=ahead)

    def _land(self) -> bool:
        """Pass on what comes of the step in flight. False if there is none."""
        flight = self._flight
        if flight is None:
            return False
        self._deliver()
        for chosen, token in zip(flight.samples, flight.land(), strict=True):
            if chosen.sequence.status is Status.FINISHED:
                continue  # ended while the step ran, or by a sibling's token just now
            if isinstance(token, InternalError):
                self.requests.end(chosen.generation, token)
            else:
                self.requests.push(chosen, token)
        self._flight = None
        return True

    def _fork(self, parent: Sample) -> list[Sample]:
        """The siblings that go on from what `parent` has computed; those there is no room for now compute it themselves later."""
        siblings, parent.generation.unforked = parent.generation.unforked, []
        forked = []
        for sibling in siblings:
            copies = self.scheduler.fork(parent.sequence, sibling.sequence)
            if copies is None:
                self.scheduler.add(sibling.sequence)
                continue
            for source, target in copies:
                self.pool.copy_page(source, target)
            forked.append(sibling)
        return forked

    def _compact(self, cohort: list[Sequence]) -> None:
        """Where no page is free for a copy, the lowest in rank gives its own up; whoever is left at last shares with nobody.

        A round that fails ends those it failed for.
        """
        while cohort:
            try:
                if self.compactor.run(cohort):
                    return
                self.scheduler.preempt(self.scheduler.running[-1])
            except RoundFailed as failure:
                _log.exception("round_failed", engine=self.name)
                for generation in {self.requests.sample_of(sequence).generation: None for sequence in failure.sequences}:
                    self.requests.end(generation, InternalError(f"engine {self.name}: {failure}"))
            cohort = [sequence for sequence in cohort if sequence.status is Status.RUNNING]


def _check_profiles(profiles: ProfileSet) -> None:
    """Steps are as large as the work there is, never padded."""
    for phase in Phase:
        profile = profiles[phase]
        if not profile.admits(1, 1):
            raise EngineIncompatible(
                f"profile {phase} must start at batch 1 and query length 1; got {profile.batch} and {profile.query_len}",
                details={"field": f"profiles.{phase}", "expected": "from 1x1", "got": str(profile)},
            )

"""The requests that one engine serves: what each is told, and the one way out for all of them, however they end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import structlog

from runtime_service.core.sampled import SampledToken
from runtime_service.core.sequence import Sequence
from runtime_service.kv.allocator import PageAllocator
from runtime_service.scheduler.scheduler import Scheduler
from runtime_service.session.generation import Generation, Sample
from runtime_service.session.statistics import Statistics
from shared.errors import InternalError, QuireError

_log = structlog.get_logger()


class LiveRequests:
    """Iterates in the order of admission. `on_end` is called once for each, before its last event and with its pages released."""

    def __init__(
        self,
        engine_name: str,
        allocator: PageAllocator,
        scheduler: Scheduler,
        statistics: Statistics,
        *,
        clock: Callable[[], float],
        on_end: Callable[[Generation], None],
    ) -> None:
        self._engine_name = engine_name
        self._allocator = allocator
        self._scheduler = scheduler
        self._statistics = statistics
        self._clock = clock
        self._on_end = on_end
        self._generations: dict[Generation, None] = {}
        self._samples: dict[Sequence, Sample] = {}

    def __len__(self) -> int:
        return len(self._generations)

    def __iter__(self) -> Iterator[Generation]:
        return iter(self._generations)

    def sample_of(self, sequence: Sequence) -> Sample:
        """KeyError for a sequence that has ended."""
        return self._samples[sequence]

    def admit(self, generation: Generation) -> None:
        self._generations[generation] = None
        self._samples |= {sample.sequence: sample for sample in generation.samples}

    def push(self, chosen: Sample, token: SampledToken) -> None:
        """One more token of a sample, which may be its last, and its request's."""
        generation, now = chosen.generation, self._clock()
        is_first = generation.times.first_token is None
        if not self._said(generation, lambda: generation.push(chosen, token, now)):
            return
        self._statistics.note_token(chosen, now, is_first=is_first)
        if chosen.finished is not None:
            self._release(chosen)
        if generation.is_finished:
            self._statistics.requests_finished += 1
            self._close(generation)
            generation.complete(self._clock())

    def end(self, generation: Generation, error: QuireError) -> None:
        """The request failed. Where that is our fault or its numbers', nobody shall go on from what it has computed."""
        self._statistics.requests_failed += 1
        if isinstance(error, InternalError):
            for chosen in generation.samples:
                self._allocator.withdraw(chosen.sequence.pages)
        self._close(generation)
        generation.fail(error)

    def end_unwanted(self) -> None:
        """Those that somebody has cancelled, that nobody reads any more, and whose time is up."""
        now = self._clock()
        for generation in list(self._generations):
            if generation.cancel_requested:
                if self._said(generation, generation.cancel):
                    self._statistics.requests_cancelled += 1
                    self._close(generation)
                    generation.complete(now)
            elif generation.stream.closed:  # the reader has left or stalled; nobody is there to be told
                self._statistics.requests_cancelled += 1
                self._close(generation)
            elif (late := generation.lateness(now)) is not None:
                self.end(generation, late)

    def _said(self, generation: Generation, say: Callable[[], None]) -> bool:
        """Whether `say` could make its output; what is raised over one request's text ends that request, never its neighbours."""
        try:
            say()
        except Exception as error:  # noqa: BLE001 - whatever it is
            _log.exception("output_failed", engine=self._engine_name)
            unnamed = InternalError(f"engine {self._engine_name} could not make the output: {type(error).__name__}: {error}")
            self.end(generation, error if isinstance(error, InternalError) else unnamed)
            return False
        return True

    def _close(self, generation: Generation) -> None:
        """The one way out for every request. The last event follows it: who has read that may use the pages and the id again."""
        for chosen in generation.samples:
            self._release(chosen)
        del self._generations[generation]
        self._statistics.note_end(generation, self._clock())
        self._on_end(generation)
        if not self._generations:
            self._check_idle()

    def _release(self, chosen: Sample) -> None:
        self._scheduler.release(chosen.sequence)
        self._samples.pop(chosen.sequence, None)

    def _check_idle(self) -> None:
        """Nothing is alive, so nothing may be owned. A leak is an alarm, not a reason to stop serving."""
        try:
            self._allocator.check_integrity()
        except InternalError as error:
            _log.error("kv_page_accounting_broken", engine=self._engine_name, error=error.message)
        if self._allocator.num_used > self._statistics.pages_leaked:
            _log.error("kv_pages_leaked", engine=self._engine_name, pages=self._allocator.num_used)
            self._statistics.pages_leaked = self._allocator.num_used

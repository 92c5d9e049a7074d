"""A live request: its stream, and for each of its samples the sequence, the sampler's state and the text so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from runtime_service.core.evidence import CompactionEvidence
from runtime_service.core.request import GenerationRequest
from runtime_service.core.sampled import SampledToken
from runtime_service.core.sequence import Sequence
from runtime_service.sampling import SamplerState
from runtime_service.streaming.events import Failure, Finished, Usage
from runtime_service.streaming.output import Output, OutputAssembler
from runtime_service.streaming.stream import TokenStream
from runtime_service.streaming.vocabulary import Vocabulary
from shared.errors import QueueTimeout, QuireError, RunTimeout
from shared.ids import PageId
from shared.manifest import ModelFacts


@dataclass(slots=True, eq=False)
class Sample:
    """One sequence and what turns its logits into output. `physical_len` is what it held when it finished.

    `last_token` is when its latest token came out.
    """

    generation: Generation
    sequence: Sequence
    sampler: SamplerState
    output: OutputAssembler
    finished: Finished | None = None
    physical_len: int = 0
    last_token: float | None = None


@dataclass(slots=True)
class Times:
    """Readings of the loop's clock: accepted, first step, first token; None = not yet."""

    submitted: float
    started: float | None = None
    first_token: float | None = None


@dataclass(slots=True, eq=False)
class Generation:
    """`samples` from one request. `cancel_requested` is the only field that other threads write.

    The prompt is computed once, by the first sample; the `unforked` others start when it is done.
    """

    request: GenerationRequest
    stream: TokenStream
    times: Times
    samples: list[Sample] = field(default_factory=list)
    unforked: list[Sample] = field(default_factory=list)
    cancel_requested: bool = False
    peak_pages: int = 0
    cached_tokens: int = 0

    @classmethod
    def create(
        cls,
        request: GenerationRequest,
        stream: TokenStream,
        *,
        arrivals: Callable[[], int],
        vocabulary: Vocabulary,
        model: ModelFacts,
        now: float,
    ) -> Generation:
        """`request.sampling.n` samples, each ranked by its turn in `arrivals`; `now` is when it was submitted."""
        generation = cls(request, stream, Times(now))
        end_ids = request.stop.end_ids(model.eos_token_ids)
        for index in range(request.sampling.n):
            sampler = SamplerState.create(
                request.sampling,
                request.prompt_ids,
                vocab_size=min(vocabulary.size, model.vocab_size),
                sample_index=index,
                end_ids=tuple(end_ids),
                min_tokens=request.stop.min_tokens,
            )
            output = OutputAssembler(index, vocabulary, request.stop, model.eos_token_ids)
            generation.samples.append(Sample(generation, Sequence(request, index, arrivals()), sampler, output))
        generation.unforked = generation.samples[1:]
        return generation

    def start(self, now: float, *, cached_tokens: int) -> None:
        """Its first step begins, and need not compute the first `cached_tokens` of the prompt."""
        self.times.started = now
        self.cached_tokens = cached_tokens

    @property
    def is_finished(self) -> bool:
        return all(sample.finished for sample in self.samples)

    def lateness(self, now: float) -> QuireError | None:
        """The deadline that has passed, as the error to end with."""
        request, times = self.request, self.times
        if request.run_deadline is not None and now >= request.run_deadline:
            allowed_s = request.run_deadline - times.submitted
            return RunTimeout(f"the request did not finish within {allowed_s:.1f} s; ask for fewer tokens or a longer run_timeout")
        if times.started is None and request.queue_deadline is not None and now >= request.queue_deadline:
            waited_s = now - times.submitted
            return QueueTimeout(f"the request waited {waited_s:.1f} s for its first step, as long as it may; try again later")
        return None

    def note_pages(self) -> None:
        held: set[PageId] = set().union(*(sample.sequence.pages for sample in self.samples))
        self.peak_pages = max(self.peak_pages, len(held))

    def push(self, sample: Sample, token: SampledToken, now: float) -> None:
        """One more token of `sample`. InternalError if it is none of the vocabulary: the request is lost, others are not."""
        self._send(sample, sample.output.push(token))
        sample.sequence.append(token.token_id)
        if self.times.first_token is None:
            self.times.first_token = now

    def complete(self, now: float) -> None:
        """Every sample has finished: the last event."""
        self.stream.put(self._usage(now))

    def cancel(self) -> None:
        """End what has not finished because somebody asked for it; `complete` follows."""
        for sample in self.samples:
            if sample.finished is None:
                self._send(sample, sample.output.cancel())

    def fail(self, error: QuireError) -> None:
        self.stream.put(Failure(error))

    def _send(self, sample: Sample, output: Output) -> None:
        if output.delta is not None:
            self.stream.put(output.delta)
        if output.finish is not None:
            self.stream.put(output.finish)
            sample.finished = output.finish
            sample.physical_len = sample.sequence.physical_len

    def _usage(self, now: float) -> Usage:
        sequences = [sample.sequence for sample in self.samples]
        started = now if self.times.started is None else self.times.started
        first_token = now if self.times.first_token is None else self.times.first_token
        evidence = sum((sequence.evidence for sequence in sequences), CompactionEvidence())
        return Usage(
            prompt_tokens=len(self.request.prompt_ids),
            generated_tokens=sum(sequence.num_generated for sequence in sequences),
            cached_tokens=self.cached_tokens,
            compaction_rounds=evidence.rounds,
            tokens_evicted=evidence.tokens_evicted,
            pages_freed=evidence.pages_freed,
            physical_length=sum(sample.physical_len for sample in self.samples),
            peak_pages=self.peak_pages,
            preemptions=sum(sequence.preemptions for sequence in sequences),
            queue_s=started - self.times.submitted,
            time_to_first_token_s=first_token - self.times.submitted,
            generate_s=now - first_token,
            rows_moved=evidence.rows_moved,
            bytes_moved=evidence.bytes_moved,
            compaction_s=evidence.duration_s,
        )

"""Drive the real serving loop from a test: requests in one line, streams that remember, turns taken one by one."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from runtime_service.core.params import CompactionParams, SamplingParams, StopParams
from runtime_service.core.request import GenerationRequest
from runtime_service.core.sequence import Sequence as KVSequence
from runtime_service.loop import ServingLoop
from runtime_service.streaming.events import Event, Failure, Finished, TokenDelta, Usage
from runtime_service.streaming.readers import Readers
from runtime_service.streaming.stream import TokenStream
from shared.errors import QuireError
from shared.ids import RequestId
from shared.kernels.compaction.modes import Mode
from tests.support.tiny_engine import Round, TinyEngine, tiny_tokenizer

SOON_S = 60.0
_numbers = itertools.count()


class RecordingStream(TokenStream):
    """A stream whose events can be looked at, with the sequences behind it. What is put after its end is remembered as a fault."""

    def __init__(self) -> None:
        super().__init__(capacity=1_000_000, stall_after_s=1e9, readers=Readers())
        self.events: list[Event] = []
        self.after_end: list[Event] = []
        self.sequences: list[KVSequence] = []

    def put(self, event: Event) -> bool:
        if not self.closed:
            self.events.append(event)
        elif self.is_ended:
            self.after_end.append(event)
        return super().put(event)

    @property
    def is_ended(self) -> bool:
        return bool(self.events) and isinstance(self.events[-1], Usage | Failure)

    def tokens(self, index: int = 0) -> list[int]:
        return [t.token_id for e in self.events if isinstance(e, TokenDelta) and e.index == index for t in e.tokens]

    def finish(self, index: int = 0) -> Finished:
        (finished,) = (e for e in self.events if isinstance(e, Finished) and e.index == index)
        return finished

    @property
    def usage(self) -> Usage:
        last = self.events[-1]
        assert isinstance(last, Usage), last
        return last

    @property
    def error(self) -> Exception:
        last = self.events[-1]
        assert isinstance(last, Failure), last
        return last.error


def request(
    prompt: Iterable[int],
    max_tokens: int,
    *,
    request_id: str = "",
    engine: str = "tiny",
    sampling: SamplingParams | None = None,
    compaction: CompactionParams | None = None,
    priority: int = 0,
    cache_salt: str = "",
    queue_deadline: float | None = None,
    run_deadline: float | None = None,
    stop_token_ids: Sequence[int] = (),
) -> GenerationRequest:
    """Greedy and through the end of text, unless told otherwise."""
    return GenerationRequest(
        request_id=RequestId(request_id or f"request-{next(_numbers)}"),
        engine=engine,
        prompt_ids=tuple(prompt),
        sampling=sampling or SamplingParams(temperature=0.0),
        stop=StopParams(max_tokens=max_tokens, ignore_eos=True, stop_token_ids=tuple(stop_token_ids)),
        compaction=compaction,
        priority=priority,
        cache_salt=cache_salt,
        queue_deadline=queue_deadline,
        run_deadline=run_deadline,
    )


def serving(engine: TinyEngine, num_pages: int, *, max_waiting: int = 64, **options: object) -> ServingLoop:
    """A loop that serves `engine` as `tiny` and takes its turns when told to (its thread is not started)."""
    loop = ServingLoop(max_waiting, **options)
    loop.add_engine("tiny", engine, tiny_tokenizer(), num_pages)
    return loop


def submit(loop: ServingLoop, *requests: GenerationRequest) -> list[RecordingStream]:
    streams = [RecordingStream() for _ in requests]
    for wanted, stream in zip(requests, streams, strict=True):
        loop.submit(wanted, stream)
        stream.sequences = [sample.sequence for sample in loop._alive[wanted.request_id].samples]
    return streams


def rounds_of(sequence: KVSequence) -> list[Round]:
    """The rounds a sequence went through, as the positions each kept, or each head of it kept."""
    rows: list[list[int]] = [[]]
    rounds, computed = [], 0
    for record in sequence.rounds:
        rows = [[*row, *range(computed, record.at)] for row in rows]
        rows = rows * (len(record.evicted) // len(rows))
        rows = [_survivors(sequence, row, set(evicted)) for row, evicted in zip(rows, record.evicted.tolist(), strict=True)]
        computed = record.at
        kept = tuple(tuple(sorted(row)) for row in rows)
        rounds.append(Round(computed, kept[0]) if len(kept) == 1 else Round(computed, (), heads=kept))
    return rounds


def _survivors(sequence: KVSequence, row: list[int], evicted: set[int]) -> list[int]:
    """Positions by ordinal after a round that evicted those ordinals."""
    compaction = sequence.request.compaction
    assert compaction is not None
    if compaction.mode is Mode.ORDERED:
        return [position for ordinal, position in enumerate(row) if ordinal not in evicted]
    length = len(row) - len(evicted)
    beyond = iter([position for ordinal, position in enumerate(row) if ordinal >= length and ordinal not in evicted])
    return [next(beyond) if ordinal in evicted else row[ordinal] for ordinal in range(length)]


def run(loop: ServingLoop, most_turns: int = 10_000) -> int:
    """Take turns until nothing is alive; returns how many. AssertionError if that does not happen."""
    for turn in range(most_turns):
        if not loop.turn():
            return turn
    raise AssertionError(f"still busy after {most_turns} turns: {loop.load()}")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.002)


def in_thread(call: Callable[[], object], loop: ServingLoop) -> object:
    """Run a blocking call beside a loop whose turns are taken here."""
    outcome: list[object] = []

    def work() -> None:
        try:
            outcome.append(call())
        except QuireError as error:
            outcome.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        loop.turn()
        thread.join(0.001)
    return outcome[0]

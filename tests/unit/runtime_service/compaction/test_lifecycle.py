"""What a follower of sequences' caches hears: each call once, in the order of the cache's life, on the real session."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from runtime_service.compaction.lifecycle import Lifecycles
from runtime_service.core.params import CompactionParams, SamplingParams
from runtime_service.core.sequence import Sequence
from runtime_service.loop import ServingLoop
from runtime_service.session.session import EngineSession
from tests.support.serving import request, run, serving, submit
from tests.support.tiny_engine import TinyEngine


class Heard:
    """Notes every call by the sequence's request and index, with what it had computed."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def note(self, call: str, sequence: Sequence) -> None:
        self.calls.append((f"{sequence.request.request_id}.{sequence.index}", call))

    def started(self, sequence: Sequence) -> None:
        assert not sequence.has_stepped
        self.note("started", sequence)

    def forked(self, parent: Sequence, child: Sequence) -> None:
        assert child.positions.tolist() == parent.positions.tolist()
        self.note("forked", child)

    def context_ended(self, sequence: Sequence) -> None:
        assert sequence.remaining == 0
        self.note("context ended", sequence)

    def step_ended(self, alive: Collection[Sequence]) -> None:
        for sequence in alive:
            assert sequence.pages
            self.note("step", sequence)

    def ended(self, sequence: Sequence) -> None:
        assert sequence.pages
        self.note("ended", sequence)

    def of(self, name: str) -> list[str]:
        return [call for who, call in self.calls if who == name]


@pytest.fixture
def heard() -> Heard:
    return Heard()


def loop_with(heard: Heard, num_pages: int = 40, engine: TinyEngine | None = None) -> tuple[ServingLoop, EngineSession]:
    loop = serving(engine or TinyEngine(profiles=("decode=4x1", "prefill=2x6")), num_pages)
    session = loop._sessions["tiny"]
    session.lifecycles = session.scheduler._lifecycles = Lifecycles([heard])
    return loop, session


def test_a_prompt_in_chunks_starts_once_and_ends_its_context_once(heard: Heard) -> None:
    """Chunks of 6, 6 and 3, then two decode steps; the last token sampled is never fed back."""
    loop, _ = loop_with(heard)
    submit(loop, request(range(15), 3, request_id="r"))
    run(loop)
    assert heard.of("r.0") == ["started", "step", "step", "context ended", "step", "step", "step", "ended"]


def test_steps_are_heard_by_everybody_alive_and_rounds_are_no_steps(heard: Heard) -> None:
    loop, session = loop_with(heard)
    submit(
        loop,
        request(range(5), 30, request_id="compacted", compaction=CompactionParams("sink_recent", 8, 2, 1)),
        request([7], 4, request_id="short"),
    )
    run(loop)
    for name in ("compacted.0", "short.0"):
        calls = heard.of(name)
        assert (calls[0], calls[-1], calls.count("context ended")) == ("started", "ended", 1)
    assert heard.of("compacted.0").count("step") == session.statistics.steps
    assert session.compactor.evidence.rounds > 5


def test_preemption_ends_a_life_and_another_one_begins(heard: Heard) -> None:
    loop, session = loop_with(heard)
    (stream,) = submit(loop, request(range(8), 6, request_id="r"))
    for _ in range(4):
        loop.turn()
    session.scheduler.preempt(stream.sequences[0])
    run(loop)
    first, second = " ".join(heard.of("r.0")).split(" ended started ")
    assert first == "started step context ended step step step"
    assert second.count("context ended") == 1
    assert heard.of("r.0").count("ended") == 2


def test_a_fork_is_heard_in_place_of_a_first_chunk(heard: Heard) -> None:
    loop, _ = loop_with(heard)
    submit(loop, request(range(5), 3, request_id="r", sampling=SamplingParams(temperature=0.0, n=2)))
    run(loop)
    assert heard.of("r.0") == ["started", "context ended", "step", "step", "step", "ended"]
    assert heard.of("r.1") == ["forked", "step", "step", "ended"]


def test_an_abort_ends_what_ran_and_nothing_of_what_never_did(heard: Heard) -> None:
    loop, session = loop_with(heard, engine=TinyEngine(profiles=("decode=1x1", "prefill=1x6")))
    running, waiting = request(range(15), 9, request_id="running"), request(range(4), 9, request_id="waiting")
    submit(loop, running, waiting)
    loop.turn()
    loop.abort(waiting.request_id)
    loop.abort(running.request_id)
    run(loop)
    assert heard.of("running.0") == ["started", "step", "ended"]
    assert heard.of("waiting.0") == []
    assert session.allocator.num_used == 0


def test_a_failed_step_ends_what_took_part(heard: Heard) -> None:
    engine = TinyEngine()
    loop, _ = loop_with(heard, engine=engine)
    submit(loop, request(range(4), 9, request_id="r"))
    loop.turn()

    def fail(inputs: object) -> None:
        raise RuntimeError("device lost")

    engine.on_run = fail
    run(loop)
    assert heard.of("r.0") == ["started", "context ended", "step", "ended"]

"""Every way a request can end: once, with its pages back, and without its neighbours noticing."""

from __future__ import annotations

import asyncio

import pytest
import torch

from runtime_service.core.params import SamplingParams
from runtime_service.engine.engine import EngineInputs
from runtime_service.sampling import SampledToken
from runtime_service.session import flight as flight_module
from runtime_service.streaming.events import Failure, Finished, FinishReason, TokenDelta, Usage
from runtime_service.streaming.readers import Readers
from runtime_service.streaming.stream import TokenStream
from shared.errors import InternalError, MemoryExhausted, QueueTimeout, RunTimeout
from shared.ids import PageId
from tests.support.serving import RecordingStream, request, run, serving, submit
from tests.support.tiny_engine import Oracle, TinyEngine


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def assert_clean(loop, *streams: RecordingStream) -> None:
    load = loop.load().engines[0]
    assert (load.pages_free, load.pages_leaked) == (load.pages_total, 0)
    assert load.requests_running == load.requests_waiting == 0
    assert loop._alive == {}
    for stream in streams:
        assert stream.is_ended
        assert stream.after_end == []


@pytest.mark.parametrize("turns", [0, 1, 2, 5])
def test_a_cancel_ends_with_what_there_is(turns: int) -> None:
    """Waiting, in mid-prefill, decoding: Finished(CANCELLED), then usage."""
    loop = serving(TinyEngine(), num_pages=40)
    cancelled, other = submit(loop, request(range(30), 9, request_id="a"), request([1, 2], 9))
    for _ in range(turns):
        loop.turn()
    assert loop.abort("a")
    run(loop)
    assert cancelled.finish().reason is FinishReason.CANCELLED
    assert cancelled.tokens() == Oracle().expected_tokens(range(30), 9)[: len(cancelled.tokens())]
    assert isinstance(cancelled.events[-1], Usage)
    assert other.tokens() == Oracle().expected_tokens([1, 2], 9)
    assert_clean(loop, cancelled, other)
    assert loop.load().engines[0].requests_cancelled == 1


def test_a_cancel_during_the_last_step_wins_over_its_result() -> None:
    """BR-117."""
    engine = TinyEngine()
    loop = serving(engine, num_pages=40)
    (stream,) = submit(loop, request([1, 2, 3], 5, request_id="a"))
    engine.on_run = lambda inputs: inputs.position_ids[0, 0] == 6 and loop.abort("a")
    run(loop)
    assert stream.finish().reason is FinishReason.CANCELLED
    assert len(stream.tokens()) == 4
    assert_clean(loop, stream)
    load = loop.load().engines[0]
    assert (load.requests_cancelled, load.requests_finished) == (1, 0)


def test_aborts_of_the_waiting_the_unknown_and_the_ended_change_nothing() -> None:
    """BR-118."""
    loop = serving(TinyEngine(profiles=("decode=1x1", "prefill=1x8")), num_pages=40)
    first, queued = submit(loop, request([1], 5, request_id="first"), request([2], 5, request_id="queued"))
    loop.turn()
    assert not loop.abort("nobody")
    assert loop.abort("queued")
    assert loop.abort("queued")
    loop.turn()
    assert not loop.abort("queued")
    assert loop.load().engines[0].requests_waiting == 0
    run(loop)
    assert not loop.abort("first")
    assert first.tokens() == Oracle().expected_tokens([1], 5)
    assert queued.tokens() == []
    assert_clean(loop, first, queued)


def test_a_reader_that_has_left_is_released_without_a_word() -> None:
    loop = serving(TinyEngine(), num_pages=40)
    gone, other = submit(loop, request(range(20), 30), request([1, 2], 9))
    for _ in range(4):
        loop.turn()
    gone.close()
    said = len(gone.events)
    run(loop)
    assert len(gone.events) == said
    assert other.tokens() == Oracle().expected_tokens([1, 2], 9)
    assert_clean(loop, other)
    assert loop.load().engines[0].requests_cancelled == 1


def test_a_reader_that_does_not_read_is_released() -> None:
    loop = serving(TinyEngine(), num_pages=40)
    stalled = TokenStream(capacity=5, readers=Readers())
    loop.submit(request(range(3), 60), stalled)
    run(loop)
    assert loop.load().engines[0].generated_tokens < 10
    assert_clean(loop)

    async def read() -> list[object]:
        return [event async for event in stalled]

    events = asyncio.run(read())
    assert isinstance(events[-1], Failure)
    assert events[-1].error.reason == "READER_STALLED"


def test_a_wait_that_is_too_long_is_a_queue_timeout_and_a_start_in_time_is_not() -> None:
    clock = Clock()
    loop = serving(TinyEngine(profiles=("decode=1x1", "prefill=1x8")), num_pages=40, clock=clock)
    running, late, patient = submit(
        loop, request([1], 20, queue_deadline=101.0), request([2], 5, queue_deadline=105.0), request([3], 5)
    )
    loop.turn()
    clock.now = 104.9
    loop.turn()
    assert not late.is_ended
    clock.now = 105.0
    run(loop)
    assert isinstance(late.error, QueueTimeout)
    assert "waited 5.0 s" in late.error.message
    assert (len(running.tokens()), len(patient.tokens())) == (20, 5)
    assert_clean(loop, running, late, patient)


@pytest.mark.parametrize("turns", [0, 3])
def test_a_run_that_is_too_long_is_a_run_timeout_wherever_it_is(turns: int) -> None:
    clock = Clock()
    loop = serving(TinyEngine(), num_pages=40, clock=clock)
    late, other = submit(loop, request(range(12), 40, run_deadline=110.0), request([2], 5))
    for _ in range(turns):
        loop.turn()
    clock.now = 110.0
    run(loop)
    assert isinstance(late.error, RunTimeout)
    assert "within 10.0 s" in late.error.message
    assert len(other.tokens()) == 5
    assert_clean(loop, late, other)
    assert loop.load().engines[0].requests_failed == 1


def test_usage_says_where_the_time_went() -> None:
    clock, engine = Clock(), TinyEngine()

    def tick(inputs: EngineInputs) -> None:
        clock.now += 1.0

    engine.on_run = tick
    loop = serving(engine, num_pages=40, clock=clock)
    (stream,) = submit(loop, request(range(20), 4))
    clock.now += 7.0
    run(loop)
    assert (stream.usage.queue_s, stream.usage.time_to_first_token_s, stream.usage.generate_s) == (7.0, 9.0, 3.0)


def test_an_engine_that_fails_in_a_step_ends_what_ran_and_not_what_waits() -> None:
    """BR-165, for one engine: streams get an error, pages come back, the loop and its queue live on."""
    engine = TinyEngine(profiles=("decode=2x1", "prefill=1x8"))
    loop = serving(engine, num_pages=40)
    running = submit(loop, request([1, 2], 20), request([3], 20))
    for _ in range(4):
        loop.turn()
    (waiting,) = submit(loop, request([4], 6))

    def fail(inputs: EngineInputs) -> None:
        engine.on_run = None
        raise RuntimeError("device lost")

    engine.on_run = fail
    loop.turn()
    for stream in running:
        assert isinstance(stream.error, InternalError)
        assert "RuntimeError: device lost" in stream.error.message
    assert not waiting.is_ended
    run(loop)
    assert waiting.tokens() == Oracle().expected_tokens([4], 6)
    assert_clean(loop, *running, waiting)
    assert loop.load().engines[0].requests_failed == 2


def test_a_device_without_room_for_a_step_is_a_typed_refusal_and_service_goes_on() -> None:
    engine = TinyEngine(runs_ahead=True)
    loop = serving(engine, num_pages=40)
    (refused,) = submit(loop, request([1, 2], 6))

    def full(_: object) -> None:
        raise MemoryExhausted("a step needs more device memory than is left")

    engine.on_run = full
    run(loop)
    assert isinstance(refused.error, MemoryExhausted)
    engine.on_run = None
    (after,) = submit(loop, request([1, 2], 6))
    run(loop)
    assert len(after.tokens()) == 6
    assert loop.load().engines[0].pages_leaked == 0


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_a_token_of_no_vocabulary_ends_its_request_alone(token_id: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """BR-100."""
    genuine = flight_module.sample

    def sample(logits, states):
        tokens = genuine(logits, states)
        return [SampledToken(token_id) if len(tokens) == 4 and row == 2 else token for row, token in enumerate(tokens)]

    monkeypatch.setattr(flight_module, "sample", sample)
    loop = serving(TinyEngine(), num_pages=40)
    streams = submit(loop, *(request([n], 6) for n in range(4)))
    run(loop)
    assert isinstance(streams[2].error, InternalError)
    for n in (0, 1, 3):
        assert streams[n].tokens() == Oracle().expected_tokens([n], 6)
    assert_clean(loop, *streams)


def test_logits_without_a_maximum_end_their_request_alone() -> None:
    class Poisoned(TinyEngine):
        def run(self, inputs, pool):
            logits = super().run(inputs, pool)
            logits[inputs.position_ids[:, 0] == 7] = torch.nan
            return logits

    loop = serving(Poisoned(), num_pages=40)
    short, long = submit(loop, request([1, 2], 6), request([3], 12))
    run(loop)
    assert len(short.tokens()) == 6
    assert isinstance(long.error, InternalError)
    assert_clean(loop, short, long)


def test_one_sample_that_fails_fails_its_siblings_and_the_stream_ends_once(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = flight_module.sample
    monkeypatch.setattr(
        flight_module,
        "sample",
        lambda logits, states: [InternalError("no") if row == 0 else t for row, t in enumerate(genuine(logits, states))],
    )
    loop = serving(TinyEngine(), num_pages=40)
    (stream,) = submit(loop, request([1], 6, sampling=SamplingParams(n=3)))
    run(loop)
    assert [type(event) for event in stream.events] == [Failure]
    assert_clean(loop, stream)


def test_events_come_in_the_order_of_the_contract() -> None:
    loop = serving(TinyEngine(), num_pages=40)
    (stream,) = submit(loop, request([1, 2], 3, sampling=SamplingParams(seed=1, n=2)))
    run(loop)
    for index in range(2):
        kinds = [type(e) for e in stream.events if getattr(e, "index", index) == index]
        assert kinds == [TokenDelta, TokenDelta, TokenDelta, Finished, Usage]


def test_a_leak_is_an_alarm_and_service_goes_on() -> None:
    """BR-033."""
    loop = serving(TinyEngine(), num_pages=40)
    session = loop._sessions["tiny"]
    session.allocator.try_allocate(2)
    submit(loop, request([1], 3))
    run(loop)
    assert loop.load().engines[0].pages_leaked == 2
    session.allocator._references[5] = 9
    (after,) = submit(loop, request([1], 3))
    run(loop)
    assert len(after.tokens()) == 3
    assert session.allocator.is_shared(PageId(5))

"""The loop around the sessions: what it admits, how it ends, and that its threads meet safely."""

from __future__ import annotations

import gc
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from runtime_service.compaction.round import Compactor
from runtime_service.core.params import CompactionParams, SamplingParams
from runtime_service.core.request import GenerationRequest
from runtime_service.loop import DrainReport, ServingLoop
from runtime_service.session.session import EngineSession
from runtime_service.streaming.events import FinishReason
from shared.errors import (
    BuildFailed,
    Draining,
    DuplicateRequest,
    EngineIncompatible,
    FieldOutOfRange,
    InternalError,
    InUse,
    KVExhausted,
    ModelNotFound,
    QueueFull,
    QuireError,
)
from tests.support.serving import RecordingStream, request, run, serving, submit
from tests.support.tiny_engine import Oracle, TinyEngine, TinyModel, tiny_tokenizer

SOON_S = 60.0


@contextmanager
def started(loop: ServingLoop) -> Iterator[ServingLoop]:
    loop.start()
    try:
        yield loop
    finally:
        loop.stop()


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


# ---- admission ----


@pytest.mark.parametrize(
    ("refused", "error"),
    [
        (request([1], 1, engine="other"), ModelNotFound),
        (request([], 1), FieldOutOfRange),
        (request([251], 1), FieldOutOfRange),
        (request([1] * 40, 30), FieldOutOfRange),
        (request([1] * 30, 20), KVExhausted),
        (request([1], 90, compaction=CompactionParams("h2o", 8, 4)), FieldOutOfRange),
        (request([1], 9, request_id="taken"), DuplicateRequest),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_what_is_refused_changes_nothing(refused, error) -> None:
    loop = serving(TinyEngine(), num_pages=11)
    (taken,) = submit(loop, request([1], 9, request_id="taken"))
    stream = RecordingStream()
    with pytest.raises(error):
        loop.submit(refused, stream)
    run(loop)
    assert stream.events == []
    assert len(taken.tokens()) == 9
    loop.submit(request([1], 9, request_id="taken"), stream)  # the id is free again


def test_a_full_queue_refuses_with_a_hint_and_has_room_again_after_a_first_step() -> None:
    loop = serving(TinyEngine(profiles=("decode=1x1", "prefill=1x8")), num_pages=40, max_waiting=2)
    submit(loop, request([1], 9), request([2], 9))
    with pytest.raises(QueueFull, match="2 requests wait for engine tiny") as caught:
        submit(loop, request([3], 9))
    assert caught.value.retry_after_s > 0
    assert caught.value.retryable
    loop.turn()
    streams = submit(loop, request([3], 9))
    run(loop)
    assert len(streams[0].tokens()) == 9


def test_the_queue_of_one_engine_is_not_the_queue_of_another() -> None:
    loop = serving(TinyEngine(), num_pages=40, max_waiting=1)
    loop.add_engine("second", TinyEngine(), tiny_tokenizer(), 40)
    submit(loop, request([1], 2), request([1], 2, engine="second"))
    with pytest.raises(QueueFull, match="engine second"):
        submit(loop, request([1], 2, engine="second"))
    run(loop)


# ---- engines ----


def test_engines_are_served_side_by_side_each_from_its_own_pool() -> None:
    loop = serving(TinyEngine(), num_pages=40)
    other = TinyModel(seed=5)
    loop.add_engine("other", TinyEngine(other), tiny_tokenizer(), 30)
    first, second = submit(loop, request([1, 2, 3], 12), request([1, 2, 3], 12, engine="other"))
    for _ in range(4):
        loop.turn()
    assert first.tokens()
    assert second.tokens()
    run(loop)
    assert first.tokens() == Oracle().expected_tokens([1, 2, 3], 12)
    assert second.tokens() == Oracle(other).expected_tokens([1, 2, 3], 12)
    assert [(load.name, load.pages_total, load.pages_free) for load in loop.load().engines] == [("tiny", 39, 39), ("other", 29, 29)]


def test_a_failing_engine_does_not_touch_another() -> None:
    engine = TinyEngine()
    engine.on_run = lambda inputs: 1 / 0
    loop = serving(TinyEngine(), num_pages=40)
    loop.add_engine("broken", engine, tiny_tokenizer(), 40)
    healthy, failing = submit(loop, request([1, 2], 9), request([1, 2], 9, engine="broken"))
    run(loop)
    assert isinstance(failing.error, InternalError)
    assert healthy.tokens() == Oracle().expected_tokens([1, 2], 9)


def test_a_request_that_cannot_be_prepared_for_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mover of rounds is compiled, or allocated, for the first request that asks for them: that may fail."""
    loop = serving(TinyEngine(), num_pages=40)
    (healthy,) = submit(loop, request([1, 2], 9))

    def no_compiler(_: Compactor, wanted: GenerationRequest) -> None:
        if wanted.compaction is not None:
            raise BuildFailed("g++ was killed")

    monkeypatch.setattr(Compactor, "prepare", no_compiler)
    (failing,) = submit(loop, request([1, 2], 9, compaction=CompactionParams("sink_recent", 8, 4)))
    run(loop)
    assert "BuildFailed: g++ was killed" in str(failing.error)
    assert healthy.tokens() == Oracle().expected_tokens([1, 2], 9)
    assert (loop.load().engines[0].requests_failed, loop.load().engines[0].pages_free) == (1, 39)


def test_a_name_is_loaded_once() -> None:
    loop = serving(TinyEngine(), num_pages=40)
    with pytest.raises(InUse, match="tiny is loaded"):
        loop.add_engine("tiny", TinyEngine(), tiny_tokenizer(), 40)


def test_an_engine_that_would_need_padding_is_refused() -> None:
    engine = TinyEngine(profiles=("decode=4x1", "prefill=1x8"))
    narrow = engine.manifest.profiles["prefill"]
    object.__setattr__(narrow.query_len, "min", 4)
    with pytest.raises(EngineIncompatible, match="profile prefill must start at batch 1 and query length 1"):
        serving(engine, num_pages=40)


def test_an_engine_is_removed_after_its_grace_with_the_rest_ended_as_retryable() -> None:
    engine = TinyEngine()
    loop = serving(engine, num_pages=40)
    short, long = submit(loop, request([1], 2), request([1, 2], 60))
    loop.turn()
    assert in_thread(lambda: loop.remove_engine("tiny"), loop) is None
    assert isinstance(long.error, Draining)
    assert long.error.retryable
    assert short.is_ended
    assert engine.closed
    assert loop.load().engines == ()
    with pytest.raises(ModelNotFound):
        submit(loop, request([1], 2))
    with pytest.raises(ModelNotFound):
        loop.remove_engine("tiny")
    loop.add_engine("tiny", TinyEngine(), tiny_tokenizer(), 40)
    (again,) = submit(loop, request([1, 2], 5))
    run(loop)
    assert len(again.tokens()) == 5


def test_a_removed_engine_leaves_no_memory_behind() -> None:
    loop = serving(TinyEngine(), num_pages=40)
    submit(loop, request(range(20), 30, compaction=CompactionParams("knorm", 8, 4)))
    for _ in range(12):
        loop.turn()
    pool = weakref.ref(loop._sessions["tiny"].pool)
    in_thread(lambda: loop.remove_engine("tiny"), loop)
    gc.collect()
    assert pool() is None


def test_an_engine_being_removed_finishes_what_it_has_and_admits_no_more() -> None:
    engine = TinyEngine()
    loop = serving(engine, num_pages=40)
    (stream,) = submit(loop, request([1, 2], 30))
    refused: list[Exception] = []

    def intrude(inputs: object) -> None:
        if loop._removing and not refused:
            try:
                submit(loop, request([3], 2))
            except ModelNotFound as error:
                refused.append(error)

    engine.on_run = intrude
    in_thread(lambda: loop.remove_engine("tiny", grace_s=SOON_S), loop)
    assert stream.tokens() == Oracle().expected_tokens([1, 2], 30)
    assert isinstance(refused[0], ModelNotFound)


def test_a_request_checked_against_an_engine_that_was_replaced_meanwhile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = serving(TinyEngine(), num_pages=40)

    def replace_engine(session: EngineSession, wanted: object) -> None:
        in_thread(lambda: loop.remove_engine("tiny"), loop)
        loop.add_engine("tiny", TinyEngine(max_len=8), tiny_tokenizer(), 40)

    monkeypatch.setattr(EngineSession, "check", replace_engine)
    with pytest.raises(ModelNotFound, match="while the request was being checked"):
        loop.submit(request([1], 60), RecordingStream())


# ---- drain, stop, death ----


def test_a_drain_finishes_what_can_finish_and_ends_the_rest_as_retryable() -> None:
    loop = serving(TinyEngine(), num_pages=40)
    submit(loop, request([1], 3))
    assert in_thread(lambda: loop.drain(SOON_S), loop) == DrainReport(finished=1, aborted=0)
    assert loop.load().draining
    with pytest.raises(Draining):
        submit(loop, request([1], 3))

    hurried = serving(TinyEngine(), num_pages=40)
    streams = submit(hurried, request([1], 60), request([2], 60))
    assert in_thread(lambda: hurried.drain(0.0), hurried) == DrainReport(finished=0, aborted=2)
    assert all(isinstance(stream.error, Draining) for stream in streams)


def test_drains_at_the_same_time_tell_the_same() -> None:
    """What one of them has ended as retryable has not reached its own end for the other."""
    loop = serving(TinyEngine(), num_pages=40)
    submit(loop, request([1], 60), request([2], 60))
    reports: list[object] = []
    patient = threading.Thread(target=lambda: reports.append(loop.drain(SOON_S)))
    patient.start()
    while not loop.load().draining:
        time.sleep(0.001)
    reports.append(in_thread(lambda: loop.drain(0.0), loop))
    while patient.is_alive():
        loop.turn()
    assert reports == [DrainReport(finished=0, aborted=2)] * 2


def test_stop_ends_what_is_alive_closes_engines_and_may_be_called_again() -> None:
    engine = TinyEngine()
    loop = serving(engine, num_pages=40)
    loop.start()
    (stream,) = submit(loop, request([1], 60))
    loop.stop()
    assert stream.is_ended
    assert engine.closed
    loop.stop()
    with pytest.raises(Draining):
        loop.submit(request([1], 1), RecordingStream())
    with pytest.raises(Draining):
        loop.drain(0.0)


def test_stop_before_start_ends_what_was_submitted() -> None:
    loop = serving(TinyEngine(), num_pages=40)
    (stream,) = submit(loop, request([1], 60))
    loop.stop()
    assert isinstance(stream.error, Draining)


def test_a_loop_that_dies_says_so_to_every_stream_and_to_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """BR-165."""
    loop = serving(TinyEngine(), num_pages=40)

    def broken(session: EngineSession) -> None:
        raise OSError("no memory for a list")

    monkeypatch.setattr(EngineSession, "load", broken)
    stream = RecordingStream()
    loop.submit(request([1], 60), stream)
    loop.start()
    wait_until(lambda: stream.is_ended)
    assert isinstance(stream.error, InternalError)
    assert "OSError: no memory" in stream.error.message
    assert loop.stalled_for_s() == math.inf
    with pytest.raises(InternalError, match="has died"):
        loop.submit(request([1], 1), RecordingStream())
    with pytest.raises(InternalError, match="has died"):
        loop.remove_engine("tiny")
    loop.stop()


def test_a_question_to_a_loop_that_dies_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = serving(TinyEngine(), num_pages=40)
    monkeypatch.setattr(EngineSession, "load", lambda session: 1 / 0)
    caught: list[Exception] = []

    def ask() -> None:
        try:
            loop.drain(0.0)
        except InternalError as error:
            caught.append(error)

    loop._inbox.post(lambda: 1 / 0)
    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: bool(loop._inbox._unanswered))
    loop.start()
    thread.join(SOON_S)
    assert "ZeroDivisionError" in caught[0].message


def test_being_stuck_is_seen_with_work_and_being_idle_is_healthy() -> None:
    """BR-166."""
    now = [0.0]
    loop = serving(TinyEngine(), num_pages=40, clock=lambda: now[0])
    now[0] = 1000.0
    assert loop.stalled_for_s() == 0.0
    submit(loop, request([1], 3))
    assert loop.stalled_for_s() == 0.0
    now[0] = 1030.0
    assert loop.stalled_for_s() == 30.0
    loop.turn()
    assert loop.stalled_for_s() == 0.0
    run(loop)
    now[0] = 2000.0
    assert loop.stalled_for_s() == 0.0


# ---- threads ----


def test_the_thread_serves_what_is_submitted_and_sleeps_when_there_is_nothing() -> None:
    turns = 0
    with started(serving(TinyEngine(), num_pages=60)) as loop:
        streams = submit_safely(loop, [request([n], 8) for n in range(6)])
        wait_until(lambda: all(stream.is_ended for stream in streams))
        genuine = loop.turn
        loop.turn = lambda: (counted(), genuine())[1]

        def counted() -> None:
            nonlocal turns
            turns += 1

        time.sleep(0.1)
        assert turns <= 1  # the one that finds nothing to do may come after the streams' ends
    assert [stream.tokens() for stream in streams] == [Oracle().expected_tokens([n], 8) for n in range(6)]


def submit_safely(loop: ServingLoop, requests: list) -> list[RecordingStream]:
    streams = [RecordingStream() for _ in requests]
    for wanted, stream in zip(requests, streams, strict=True):
        loop.submit(wanted, stream)
    return streams


def test_overlapping_requests_of_one_id_get_only_their_own_tokens() -> None:
    """BR-121: one of two is refused; the other's output is whole."""
    with started(serving(TinyEngine(), num_pages=60)) as loop:
        stream, second = RecordingStream(), RecordingStream()
        loop.submit(request([1, 2], 60, request_id="same"), stream)
        with pytest.raises(DuplicateRequest):
            loop.submit(request([3, 4], 60, request_id="same"), second)
        wait_until(lambda: stream.is_ended)
    assert stream.tokens() == Oracle().expected_tokens([1, 2], 60)
    assert second.events == []


def test_many_threads_submit_and_abort_at_once() -> None:
    """BR-126: one thread runs the engine, whoever asks."""
    engine = TinyEngine()
    threads_seen: set[int] = set()
    engine.on_run = lambda inputs: threads_seen.add(threading.get_ident())
    expected = {n: Oracle().expected_tokens([n, n + 1], 12) for n in range(24)}
    streams: dict[int, RecordingStream] = {n: RecordingStream() for n in range(24)}
    with started(serving(engine, num_pages=30)) as loop:

        def client(first: int) -> None:
            for n in range(first, 24, 4):
                loop.submit(request([n, n + 1], 12, request_id=f"r{n}"), streams[n])
                if n % 3 == 0:
                    loop.abort(f"r{n}")

        clients = [threading.Thread(target=client, args=(first,)) for first in range(4)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join(SOON_S)
        wait_until(lambda: all(stream.is_ended for stream in streams.values()))
        wait_until(lambda: loop.load().engines[0].pages_free == 29)
    assert len(threads_seen) == 1
    for n, stream in streams.items():
        if stream.finish().reason is FinishReason.CANCELLED:
            assert n % 3 == 0
            assert stream.tokens() == expected[n][: len(stream.tokens())]
        else:
            assert stream.tokens() == expected[n]


def test_samples_of_a_request_are_aborted_together() -> None:
    loop = serving(TinyEngine(), num_pages=60)
    (stream,) = submit(loop, request([1], 40, request_id="a", sampling=SamplingParams(seed=1, n=4)))
    for _ in range(5):
        loop.turn()
    loop.abort("a")
    run(loop)
    assert [stream.finish(index).reason for index in range(4)] == [FinishReason.CANCELLED] * 4
    assert loop.load().engines[0].pages_free == 59

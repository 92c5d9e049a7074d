"""The loop around the sessions: what it admits, engines that come and go, and that its threads meet safely."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from runtime_service.compaction.round import Compactor
from runtime_service.core.params import CompactionParams, SamplingParams
from runtime_service.core.request import GenerationRequest
from runtime_service.loop import ServingLoop
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
)
from tests.support.serving import SOON_S, RecordingStream, in_thread, request, run, serving, submit, wait_until
from tests.support.tiny_engine import Oracle, TinyEngine, TinyModel, tiny_tokenizer


@contextmanager
def started(loop: ServingLoop) -> Iterator[ServingLoop]:
    loop.start()
    try:
        yield loop
    finally:
        loop.stop()


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

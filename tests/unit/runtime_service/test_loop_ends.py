"""How the loop ends: a drain, a stop, a death; and what a probe sees of it meanwhile."""

from __future__ import annotations

import math
import threading
import time

import pytest

from runtime_service.inbox import Inbox
from runtime_service.loop import DrainReport
from runtime_service.session.session import EngineSession
from shared.errors import (
    Draining,
    InternalError,
)
from tests.support.serving import SOON_S, RecordingStream, in_thread, request, run, serving, submit, wait_until
from tests.support.tiny_engine import TinyEngine


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


class Panic(BaseException):
    """What a library written in Rust raises where it panics."""


@pytest.mark.parametrize("cause", [OSError("no memory for a list"), Panic("no memory for a list")], ids=["error", "panic"])
def test_a_loop_that_dies_says_so_to_every_stream_and_to_the_probe(monkeypatch: pytest.MonkeyPatch, cause: BaseException) -> None:
    """BR-165."""
    loop = serving(TinyEngine(), num_pages=40)

    def broken(session: EngineSession) -> None:
        raise cause

    monkeypatch.setattr(EngineSession, "load", broken)
    stream = RecordingStream()
    loop.submit(request([1], 60), stream)
    loop.start()
    wait_until(lambda: stream.is_ended)
    assert isinstance(stream.error, InternalError)
    assert f"{type(cause).__name__}: no memory" in stream.error.message
    assert loop.stalled_for_s() == math.inf
    with pytest.raises(InternalError, match="has died"):
        loop.submit(request([1], 1), RecordingStream())
    with pytest.raises(InternalError, match="has died"):
        loop.remove_engine("tiny")
    loop.stop()


def test_a_question_whose_answer_is_a_panic_is_answered() -> None:
    inbox, caught = Inbox(), []

    def panic() -> None:
        raise Panic

    def ask() -> None:
        try:
            inbox.ask(panic)
        except Panic as error:
            caught.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    wait_until(lambda: bool(inbox._unanswered))
    inbox.carry_out()
    thread.join(SOON_S)
    assert len(caught) == 1


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


def test_what_is_asked_behind_the_closing_is_answered_by_it_and_not_carried_out() -> None:
    """A question may be left between the last command and the closing: an unload whose requests a stop has just ended."""
    inbox, carried_out, told = Inbox(), list[str](), list[BaseException]()

    def ask() -> None:
        try:
            inbox.ask(lambda: carried_out.append("asked"))
        except Draining as error:
            told.append(error)

    asking = threading.Thread(target=ask)

    def close() -> None:
        asking.start()
        wait_until(lambda: bool(inbox._unanswered))  # in the queue, behind this
        inbox.close(Draining("over"))
        asking.join(SOON_S)

    inbox.post(close)
    inbox.carry_out()
    assert [str(error) for error in told] == ["over"]
    assert not carried_out


def test_a_loop_that_died_over_a_question_still_closes_its_engines() -> None:
    engine = TinyEngine()
    loop = serving(engine, num_pages=40)

    def unload() -> None:
        with pytest.raises(InternalError, match="died"):
            loop.remove_engine("tiny")

    unloading = threading.Thread(target=unload)
    unloading.start()
    wait_until(lambda: bool(loop._inbox._unanswered))  # asked, and not carried out
    loop._die(RuntimeError("broken"))  # as its thread would
    unloading.join(SOON_S)
    loop.stop()
    assert engine.closed

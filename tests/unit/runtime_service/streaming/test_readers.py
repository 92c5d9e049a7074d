"""When readers of events are let go on: together, when they are released, and never for most of the time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from runtime_service.streaming.readers import Readers


class EventLoop:
    """Runs what it is asked to when it is told to, by a clock that is set; `spent` is its thread's CPU time."""

    def __init__(self) -> None:
        self.now, self.spent, self.is_shut = 100.0, 0.0, False
        self.calls: list[tuple[float, Callable[..., None], tuple[Any, ...]]] = []

    def call_soon_threadsafe(self, call: Callable[..., None], *args: Any) -> None:
        if self.is_shut:
            raise RuntimeError("Event loop is closed")
        self.call_later(0.0, call, *args)

    def call_later(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        self.calls.append((self.now + delay, call, args))

    def run_until(self, moment: float) -> None:
        while due := [entry for entry in self.calls if entry[0] <= moment]:
            entry = min(due, key=lambda call: call[0])
            self.calls.remove(entry)
            self.now = max(self.now, entry[0])
            entry[1](*entry[2])
        self.now = moment


class Waiting:
    """A future of `loop`."""

    def __init__(self, loop: EventLoop) -> None:
        self.loop, self.resolved_at = loop, None

    def get_loop(self) -> EventLoop:
        return self.loop

    def done(self) -> bool:
        return self.resolved_at is not None

    def set_result(self, _: None) -> None:
        assert not self.done()
        self.resolved_at = self.loop.now


@pytest.fixture
def loop() -> EventLoop:
    return EventLoop()


@pytest.fixture
def readers(loop: EventLoop) -> Readers:
    return Readers(clock=lambda: loop.now, cpu=lambda: loop.spent)


def waiting(readers: Readers, loop: EventLoop, count: int) -> list[Waiting]:
    futures = [Waiting(loop) for _ in range(count)]
    for future in futures:
        readers.add(future)
    return futures


def test_none_goes_on_before_the_release_and_then_all_do_at_once(readers: Readers, loop: EventLoop) -> None:
    futures = waiting(readers, loop, 100)
    loop.run_until(101.0)
    assert not any(future.done() for future in futures)
    readers.release()
    readers.release()
    assert len(loop.calls) == 1
    loop.run_until(101.0)
    assert all(future.resolved_at == 101.0 for future in futures)
    readers.release()
    assert loop.calls == []


def test_a_round_waits_for_as_long_as_the_last_one_took(readers: Readers, loop: EventLoop) -> None:
    waiting(readers, loop, 1)
    readers.release()
    loop.run_until(100.0)
    loop.spent, loop.now = 0.006, 100.006  # what the first round's reader did
    (second,) = waiting(readers, loop, 1)
    readers.release()
    loop.run_until(100.011)
    assert not second.done()
    (third,) = waiting(readers, loop, 1)
    readers.release()
    loop.run_until(100.1)
    assert second.resolved_at == third.resolved_at == pytest.approx(100.012)


def test_a_cheap_round_is_followed_by_the_next_without_a_pause(readers: Readers, loop: EventLoop) -> None:
    for step in range(5):
        loop.now = 100.0 + 0.01 * step
        (future,) = waiting(readers, loop, 1)
        readers.release()
        loop.run_until(loop.now)
        assert future.resolved_at == loop.now
        loop.spent += 0.004  # a step of 10 ms leaves as much again


def test_whatever_else_keeps_the_thread_busy_does_not_hold_readers_up(readers: Readers, loop: EventLoop) -> None:
    waiting(readers, loop, 1)
    readers.release()
    loop.run_until(100.0)
    (future,) = waiting(readers, loop, 1)
    readers.release()
    loop.spent, loop.now = 7.0, 107.0  # busy throughout with something else
    loop.run_until(107.0)
    assert future.resolved_at == 107.0


def test_readers_of_a_loop_that_is_gone_do_not_keep_others_waiting(readers: Readers, loop: EventLoop) -> None:
    waiting(readers, loop, 1)
    loop.is_shut = True
    readers.release()
    readers.release()
    other = EventLoop()
    (future,) = waiting(readers, other, 1)
    readers.release()
    other.run_until(100.0)
    assert future.done()


async def test_a_reader_whose_task_has_been_cancelled_is_passed_over() -> None:
    readers = Readers()
    gone, here = (asyncio.get_running_loop().create_future() for _ in range(2))
    readers.add(gone)
    readers.add(here)
    gone.cancel()
    readers.release()
    await asyncio.wait_for(here, 10)

"""Letting the coroutines that wait for events go on: together, and when it does not hold up the serving loop.

They share an interpreter with the loop, and a message costs them some 0.05 to 0.1 ms of it. So the loop says when: once it has
launched a step and is about to wait for the device anyway, not while it has that step to prepare. And a round of them begins only
when as much time has passed without them as the last round took: with a hundred streams of a fast model, tokens that come meanwhile
travel in one message. With few streams, or slow steps, every token has its own.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress

_LONGEST_PAUSE_S = 0.05
"""Between two rounds: whatever else keeps the readers' thread busy does not hold them up for longer."""


class Readers:
    """Of one event loop. `cpu` reads the CPU seconds of the thread that calls it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, cpu: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._cpu = cpu
        self._lock = threading.Lock()
        self._ready: list[asyncio.Future[None]] = []
        self._coming_on: asyncio.AbstractEventLoop | None = None
        """Where a round has been asked for and has not begun."""
        self._last_round = (0.0, 0.0)
        """`clock` and `cpu` when it began; its event loop's thread alone touches it."""

    def add(self, reader: asyncio.Future[None]) -> None:
        """Resolve `reader` in the next round. From any thread."""
        with self._lock:
            self._ready.append(reader)

    def release(self) -> None:
        """Have a round begin, if there is anybody to let go on. From any thread; never waits."""
        with self._lock:
            if not self._ready:
                return
            loop = self._ready[-1].get_loop()
            if loop is self._coming_on:
                return
            self._coming_on = loop
        with suppress(RuntimeError):  # it is closed: nobody reads any more
            loop.call_soon_threadsafe(self._begin, loop)

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        now, spent = self._clock(), self._cpu()
        began, spent_before = self._last_round
        pause = began + min(2 * (spent - spent_before), _LONGEST_PAUSE_S) - now
        if pause > 0:
            loop.call_later(pause, self._begin, loop)
            return
        self._last_round = now, spent
        with self._lock:
            self._coming_on = None
            ready, self._ready = self._ready, []
        for reader in ready:
            if not reader.done():  # the reading task may have been cancelled meanwhile
                reader.set_result(None)

"""The bridge from the serving loop's thread to the coroutine that answers one call.

The loop must never wait for a reader, so a put is an append under a short lock, and a reader that falls too far behind loses its
stream instead of slowing the loop down.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

from runtime_service.streaming.events import Event, Failure, TokenDelta, Usage
from runtime_service.streaming.readers import Readers
from shared.errors import ReaderStalled

DEFAULT_CAPACITY = 8192
DEFAULT_STALL_AFTER_S = 30.0
_MOST_JOINED = 64
"""Deltas in one event: messages stay small, however far behind a reader is."""


class TokenStream:
    """Events of one request, in order, ended once by Usage, Failure or `close`.

    A reader has stalled when `capacity` events wait, or when events have waited `stall_after_s` without one being taken; what
    waits then is still delivered, followed by Failure(ReaderStalled). Deltas of one sample that wait together are read as one.
    """

    def __init__(
        self,
        capacity: int = DEFAULT_CAPACITY,
        stall_after_s: float = DEFAULT_STALL_AFTER_S,
        clock: Callable[[], float] = time.monotonic,
        *,
        readers: Readers,
    ) -> None:
        self._capacity = capacity
        self._stall_after_s = stall_after_s
        self._clock = clock
        self._lock = threading.Lock()
        self._events: deque[Event] = deque()
        self._waiting_since = clock()
        self._closed = False
        self._readers = readers
        self._reader: asyncio.Future[None] | None = None

    @property
    def closed(self) -> bool:
        """Nothing further will be accepted; the producer may stop working for this stream."""
        return self._closed

    def put(self, event: Event) -> bool:
        """Append from any thread; never waits. False = the stream is closed (now or before) and `event` will not be read.

        A reader that waits goes on when its Readers are released.
        """
        with self._lock:
            if self._closed:
                return False
            now = self._clock()
            if not self._events:
                self._waiting_since = now
            stalled = self._stall(now)
            if stalled is not None:
                event = Failure(stalled)
            self._closed = isinstance(event, Usage | Failure)
            self._events.append(event)
            self._wake()
        return stalled is None

    def close(self) -> None:
        """End the stream from the reader's side (its call is gone): later puts are refused, what waits is dropped."""
        with self._lock:
            self._closed = True
            self._events.clear()
            self._wake()
        self._readers.release()

    def _stall(self, now: float) -> ReaderStalled | None:
        waited = now - self._waiting_since
        if len(self._events) < self._capacity and waited <= self._stall_after_s:
            return None
        return ReaderStalled(
            f"the reader left {len(self._events)} events unread, the oldest for {waited:.1f} s; at most {self._capacity} and "
            f"{self._stall_after_s:g} s are kept; read faster or ask for fewer tokens at a time"
        )

    def _wake(self) -> None:
        """Let a waiting reader look again. The lock is held, so each future is resolved by one caller only."""
        reader, self._reader = self._reader, None
        if reader is not None:
            self._readers.add(reader)

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        while True:
            with self._lock:
                if self._events:
                    self._waiting_since = self._clock()
                    return self._take()
                if self._closed:
                    raise StopAsyncIteration
                self._reader = reader = asyncio.get_running_loop().create_future()
            await reader

    def _take(self) -> Event:
        """The next event, with the lock held."""
        event = self._events.popleft()
        if not isinstance(event, TokenDelta):
            return event
        joined = [event]
        while self._events and len(joined) < _MOST_JOINED:
            following = self._events[0]
            if not isinstance(following, TokenDelta) or following.index != event.index:
                break
            joined.append(following)
            self._events.popleft()
        return TokenDelta.join(joined)

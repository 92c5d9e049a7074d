"""Commands from any thread to the one thread that carries them out.

`post` leaves a command and goes on, `ask` waits for its answer. Once closed nothing is carried out any more: whoever waits for an
answer gets the reason, and so does everyone who asks later.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from shared.errors import QuireError

_T = TypeVar("_T")


class Inbox:
    """`closed` is why nothing is carried out any more; None as long as something is."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._unanswered: set[Future[Any]] = set()
        self.closed: QuireError | None = None

    def post(self, command: Callable[[], object]) -> None:
        """What it raises is raised in the thread that carries it out."""
        self._commands.put(command)

    def wake(self) -> None:
        """The command that only ends a wait."""
        self._commands.put(_nothing)

    def ask(self, command: Callable[[], _T]) -> _T:
        """What `command` returned or raised. Blocks; raises `closed` if it is not carried out."""
        answer: Future[_T] = Future()

        def carry_out() -> None:
            with self._lock:
                if answer not in self._unanswered:
                    return  # closed meanwhile: whoever asked has been told so
                self._unanswered.remove(answer)
            try:
                answer.set_result(command())
            except BaseException as error:  # noqa: BLE001 - it belongs to whoever asked, a library's panic too
                answer.set_exception(error)

        with self._lock:
            if self.closed is not None:
                raise self.closed
            self._unanswered.add(answer)
            self._commands.put(carry_out)
        return answer.result()

    # ---- for the thread that carries out ----

    def carry_out(self) -> None:
        """All that is here."""
        with suppress(queue.Empty):
            while True:
                self._commands.get_nowait()()

    def wait(self, timeout_s: float | None) -> None:
        """Carry out the next command, if one comes in time."""
        with suppress(queue.Empty):
            self._commands.get(timeout=timeout_s)()

    def close(self, why: QuireError) -> None:
        """Carry out nothing more. Whoever waits for an answer, or asks from now on, gets `why`."""
        with self._lock:
            self.closed = why
            unanswered, self._unanswered = self._unanswered, set()
        for answer in unanswered:
            answer.set_exception(why)


def _nothing() -> None:
    pass

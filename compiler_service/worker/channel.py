"""The build process's end of the pipes."""

from __future__ import annotations

import os
import signal
import threading
import time

from compiler_service.worker.protocol import AskToPublish, Message, Progress, Request, decode_request, encode

MIN_REPORT_INTERVAL_S = 0.5


class Channel:
    """The two pipes to the service. Made once, first thing: it takes standard input and output over."""

    def __init__(self) -> None:
        # Libraries and compilers print where they like: their standard output becomes standard error, the pipe stays ours.
        self._reports = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        # Unbuffered: a thread that waits in a buffered reader holds its lock, and Python aborts over that when it ends.
        self._commands = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115 - open as long as the process
        self._allowed = threading.Event()
        self._last_stage, self._last_report = "", 0.0

    def request(self) -> Request:
        """What is asked of this process. From here on the end of the pipe, that is of the service, ends this process group."""
        request = decode_request(self._commands.readline())
        threading.Thread(target=self._watch_commands, name="service-watch", daemon=True).start()
        return request

    def _watch_commands(self) -> None:
        while self._commands.readline():
            self._allowed.set()
        os.killpg(0, signal.SIGKILL)

    def send(self, message: Message) -> None:
        self._reports.write(encode(message))
        self._reports.flush()

    def progress(self, stage: str, fraction: float, message: str) -> None:
        """Report, unless the same stage has reported a moment ago."""
        now = time.monotonic()
        if stage != self._last_stage or fraction >= 1.0 or now - self._last_report >= MIN_REPORT_INTERVAL_S:
            self._last_stage, self._last_report = stage, now
            self.send(Progress(stage, fraction, message))

    def wait_for_permission(self) -> None:
        """Returns once the service has recorded that this attempt publishes; a service that refuses ends this process instead."""
        self.send(AskToPublish())
        self._allowed.wait()

"""A real Redis for tests, private to them."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
import redis


class RedisServer:
    """A real redis-server on a Unix socket, with an append-only file synced before each answer, nothing shared with any other."""

    def __init__(self, *options: str) -> None:
        program = shutil.which("redis-server")
        if program is None:
            pytest.fail("redis-server is not installed; the queue's conformance suite needs it: apt-get install -y redis-server")
        self._directory = Path(tempfile.mkdtemp(prefix="quire-redis-"))  # short: socket paths are limited to 107 bytes
        self.url = f"unix://{self._directory}/socket"
        files = ("--unixsocket", f"{self._directory}/socket", "--dir", str(self._directory))
        self._command = [program, "--port", "0", *files, "--appendonly", "yes", "--appendfsync", "always", "--save", "", *options]
        self.start()

    def start(self) -> None:
        """Returns once the server answers: it has then read its append-only file."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        client = redis.Redis(unix_socket_path=f"{self._directory}/socket")
        deadline = time.monotonic() + 30
        while True:
            try:
                client.ping()
                break
            except (redis.ConnectionError, redis.exceptions.BusyLoadingError):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"redis-server did not start (exit status {self._process.poll()})")
                time.sleep(0.02)
        client.close()

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self._directory)

"""One build process as the service sees it: started in a session of its own, spoken to over pipes, ended with all its children."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from compiler_service.worker.process_tree import ProcessStat, kill_tree, read_stat, tree_rss_bytes
from compiler_service.worker.protocol import Message, Request, decode_message, encode
from shared.errors import InternalError

COMMAND = (sys.executable, "-m", "compiler_service.worker.child")
MAX_LINE_BYTES = 8 << 20
KEPT_LOGS = 100
MAX_SCRATCH_AGE_S = 8 * 86400.0
"""Above the longest run a job's limits can allow."""
_TAIL_BYTES = 1500
_ENVIRONMENT = {
    # A build works on local files alone.
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # libgomp's spinning threads starve every other process of a small machine.
    "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "1000"),
}


@dataclass(frozen=True, slots=True)
class Launcher:
    """How build processes are started. `directory` holds their scratch (gone with each) and their logs (kept if they fail)."""

    directory: Path
    command: Sequence[str] = COMMAND

    @asynccontextmanager
    async def process(self, request: Request, name: str) -> AsyncIterator[BuildProcess]:
        """A running process that has its request. However the context ends, nothing of it is left running."""
        scratch, log = self.directory / f"{name}.tmp", self.directory / f"{name}.log"
        await asyncio.to_thread(self._sweep)
        scratch.mkdir(parents=True, exist_ok=True)
        try:
            with log.open("wb") as errors:
                process = await asyncio.create_subprocess_exec(
                    *self.command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=errors,
                    env=os.environ | _ENVIRONMENT | {"TMPDIR": str(scratch)},
                    start_new_session=True,
                    limit=MAX_LINE_BYTES,
                )
            build = BuildProcess(process, log)
            try:
                build.find()
                await build.write(encode(request))
                yield build
            finally:
                await build.kill()
        finally:
            await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)

    def _sweep(self) -> None:
        """Drop all but the newest logs, and scratch that a service left behind when it was killed."""
        for _, log in sorted(self._written("*.log"))[:-KEPT_LOGS]:
            log.unlink(missing_ok=True)
        for written_s, scratch in self._written("*.tmp"):
            if time.time() - written_s > MAX_SCRATCH_AGE_S:
                shutil.rmtree(scratch, ignore_errors=True)

    def _written(self, pattern: str) -> Iterator[tuple[float, Path]]:
        """When what is there was written; other builds come and go meanwhile, and take theirs away."""
        for path in self.directory.glob(pattern):
            with contextlib.suppress(FileNotFoundError):
                yield path.stat().st_mtime, path


class BuildProcess:
    """A started build process; made by `Launcher.process`."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process, self._log = process, log
        self._leader: ProcessStat | None = None

    def find(self) -> None:
        """Remember which process it is: its number may be another's once it has ended. One that is gone already started none."""
        self._leader = read_stat(self._process.pid)

    async def write(self, line: bytes) -> None:
        """Send a line. A process that is gone already does not mind: what became of it shows in `messages`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            await self._process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            return

    async def allow_publication(self) -> None:
        await self.write(b"\n")

    async def messages(self) -> AsyncIterator[Message]:
        """What it says, until it closes its end. InternalError for a line that is no message."""
        assert self._process.stdout is not None
        try:
            async for line in self._process.stdout:
                yield decode_message(line)
        # pydantic's ValidationError is one, and so is what asyncio raises for a line over its limit.
        except ValueError as error:
            raise InternalError(f"a build process said what this service does not understand: {str(error)[:300]}") from error

    def rss_bytes(self) -> int:
        """Resident memory of the process and all it started. Reads /proc: call it off the event loop."""
        return tree_rss_bytes(self._leader) if self._leader else 0

    async def kill(self) -> None:
        """End it and everything it started, and collect it. Idempotent."""
        try:
            if self._leader:
                await asyncio.to_thread(kill_tree, self._leader)
        finally:
            # Where /proc cannot be read for want of descriptors, at least this one; not before the others, found through it.
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
        await self._process.wait()

    async def how_it_ended(self) -> str:
        """Waits for the end; exit code or signal, and the last lines of its log."""
        code = await self._process.wait()
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{how}; its log {self._log.name} ends: {self.log_tail() or '(empty)'}"

    def log_tail(self) -> str:
        with self._log.open("rb") as file:
            file.seek(max(0, self._log.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace").strip()

    def drop_log(self) -> None:
        self._log.unlink(missing_ok=True)

"""`quire up`: both services in the foreground, as two processes, until one ends or somebody stops them."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from shared.cli.session import session_of
from shared.errors import Conflict, FieldOutOfRange, Unavailable
from shared.rpc.server import stop_signals

DEFAULT_DATA = Path("~/.local/share/quire")
READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0


@dataclass(slots=True)
class Service:
    """A child process that prints one JSON line with its real address once it serves."""

    name: str
    process: asyncio.subprocess.Process
    address: str = ""

    @classmethod
    async def start(cls, name: str, module: str, environment: dict[str, str]) -> Service:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            env=os.environ | environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )
        return cls(name, process)

    async def ready(self) -> None:
        """Returns once it serves at `address`; Unavailable where it ends or takes too long."""
        assert self.process.stdout is not None
        try:
            line = await asyncio.wait_for(self.process.stdout.readline(), READY_TIMEOUT_S)
        except TimeoutError:
            raise Unavailable(f"the {self.name} service was not ready within {READY_TIMEOUT_S:.0f} s; its log is above") from None
        if not line:
            code = await self.process.wait()
            raise Unavailable(f"the {self.name} service ended with exit code {code} before it was ready; its log is above")
        self.address = str(json.loads(line)["address"])

    async def end(self) -> None:
        """SIGTERM, time to drain, then SIGKILL."""
        if self.process.returncode is not None:
            return
        self.process.terminate()
        try:
            await asyncio.wait_for(self.process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()


@contextlib.contextmanager
def held(directory: Path) -> Iterator[None]:
    """The data directory, made if need be, for one `quire up` alone: two runtimes would overwrite each other's list of engines."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / "up.lock").open("a")
    except OSError as error:
        raise FieldOutOfRange(f"--data must be a directory this user may write to: {error}", field="--data") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"another `quire up` serves from {directory}: stop it, or give this one a directory of its own by --data"
            raise Conflict(message, field="--data") from None
        yield


def up_command(
    context: typer.Context,
    data: Annotated[
        Path, typer.Option(envvar="QUIRE_DATA", help="jobs, artifacts and the list of loaded engines live here")
    ] = DEFAULT_DATA,
    compiler_address: Annotated[str, typer.Option(help="host:port; port 0 = any free port; empty = where clients look")] = "",
    runtime_address: Annotated[str, typer.Option(help="host:port; port 0 = any free port; empty = where clients look")] = "",
    redis: Annotated[str, typer.Option(help="redis:// URL of a queue that several compilers share; empty = a file in DATA")] = "",
    store: Annotated[
        str, typer.Option(help="s3://bucket/prefix (AWS_* variables name endpoint and keys) or a directory; empty = in DATA")
    ] = "",
) -> None:
    """Run both services in the foreground and print one JSON line when they are ready."""
    session = session_of(context)
    directory = data.expanduser().resolve()
    compiler = {"QUIRE_DATA": str(directory), "QUIRE_COMPILER_ADDRESS": compiler_address or session.compiler_address}
    runtime = {"QUIRE_DATA": str(directory), "QUIRE_RUNTIME_ADDRESS": runtime_address or session.runtime_address}
    # What is not given here may still come from the environment.
    if redis:
        compiler["QUIRE_COMPILER_REDIS_URL"] = redis
    if store:
        compiler["QUIRE_COMPILER_STORE"] = runtime["QUIRE_RUNTIME_STORE"] = store
    with held(directory):
        asyncio.run(_serve(compiler, runtime, directory))


async def _serve(compiler_environment: dict[str, str], runtime_environment: dict[str, str], directory: Path) -> None:
    services: list[Service] = []
    async with stop_signals() as stopped:
        stop = asyncio.create_task(stopped.wait())
        try:
            services.append(await Service.start("compiler", "compiler_service", compiler_environment))
            services.append(await Service.start("runtime", "runtime_service", runtime_environment))
            ready = asyncio.gather(*(service.ready() for service in services))
            await asyncio.wait((stop, ready), return_when=asyncio.FIRST_COMPLETED)
            if stopped.is_set():
                ready.cancel()
                return
            await ready
            addresses = {f"{service.name}_address": service.address for service in services}
            print(json.dumps({"ready": True} | addresses | {"data": str(directory), "pid": os.getpid()}), flush=True)
            ends = {asyncio.create_task(s.process.wait()): s for s in services}
            done, _ = await asyncio.wait({stop, *ends}, return_when=asyncio.FIRST_COMPLETED)
            dead = [ends[task] for task in done if task in ends]
            if dead and not stopped.is_set():
                raise Unavailable(f"the {dead[0].name} service ended with exit code {dead[0].process.returncode}; its log is above")
        finally:
            stop.cancel()
            await asyncio.gather(*(service.end() for service in services))

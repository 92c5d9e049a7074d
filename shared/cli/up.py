"""`quire up`: both services in the foreground, as two processes, until one ends or somebody stops them."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from shared.cli.session import session_of
from shared.errors import Conflict, FieldOutOfRange
from shared.rpc.server import stop_signals
from shared.service_process import ServiceProcess, all_ready, until_one_ends

DEFAULT_DATA = Path("~/.local/share/quire")
READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0


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
    services: list[ServiceProcess] = []
    async with stop_signals() as stopped:
        try:
            for name, environment in (("compiler", compiler_environment), ("runtime", runtime_environment)):
                started = await ServiceProcess.start(f"{name} service", f"{name}_service", os.environ | environment)
                services.append(started)
            if not await all_ready(stopped, services, READY_TIMEOUT_S):
                return
            compiler, runtime = services
            addresses = {"compiler_address": compiler.address, "runtime_address": runtime.address}
            print(json.dumps({"ready": True} | addresses | {"data": str(directory), "pid": os.getpid()}), flush=True)
            await until_one_ends(stopped, services)
        finally:
            await asyncio.gather(*(service.end(STOP_TIMEOUT_S) for service in services))

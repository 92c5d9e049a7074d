"""`quire up`: both services in the foreground, as two processes, until one ends or somebody stops them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from shared.cli.session import COMPILER_ADDRESS, RUNTIME_ADDRESS, session_of
from shared.errors import Unavailable
from shared.rpc.server import stop_signals

DEFAULT_DATA = Path("~/.local/share/quire")
READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0


@dataclass(slots=True)
class Service:
    """A child process that prints one JSON line with its real address once it serves."""

    name: str
    process: asyncio.subprocess.Process
    address: str

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
        assert process.stdout is not None
        try:
            line = await asyncio.wait_for(process.stdout.readline(), READY_TIMEOUT_S)
        except TimeoutError:
            await _end(process)
            raise Unavailable(f"the {name} service was not ready within {READY_TIMEOUT_S:.0f} s; its log is above") from None
        if not line:
            code = await process.wait()
            raise Unavailable(f"the {name} service ended with exit code {code} before it was ready; its log is above")
        return cls(name, process, str(json.loads(line)["address"]))


async def _end(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, time to drain, then SIGKILL."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()


def up_command(
    context: typer.Context,
    data: Annotated[Path, typer.Option(envvar="QUIRE_DATA", help="jobs, artifacts and logs live here")] = DEFAULT_DATA,
    compiler_address: Annotated[str, typer.Option(help="host:port; port 0 = any free port")] = COMPILER_ADDRESS,
    runtime_address: Annotated[str, typer.Option(help="host:port; port 0 = any free port")] = RUNTIME_ADDRESS,
    redis: Annotated[str, typer.Option(help="redis:// URL of a queue that several compilers share; empty = a file in DATA")] = "",
    store: Annotated[
        str, typer.Option(help="s3://bucket/prefix (AWS_* variables name endpoint and keys) or a directory; empty = in DATA")
    ] = "",
) -> None:
    """Run both services in the foreground and print one JSON line when they are ready."""
    session_of(context)
    directory = data.expanduser().resolve()
    directory.mkdir(parents=True, exist_ok=True)
    compiler = {"QUIRE_DATA": str(directory), "QUIRE_COMPILER_ADDRESS": compiler_address}
    runtime = {"QUIRE_DATA": str(directory), "QUIRE_RUNTIME_ADDRESS": runtime_address}
    # What is not given here may still come from the environment.
    if redis:
        compiler["QUIRE_COMPILER_REDIS_URL"] = redis
    if store:
        compiler["QUIRE_COMPILER_STORE"] = runtime["QUIRE_RUNTIME_STORE"] = store
    asyncio.run(_serve(compiler, runtime, directory))


async def _serve(compiler_environment: dict[str, str], runtime_environment: dict[str, str], directory: Path) -> None:
    services: list[Service] = []
    async with stop_signals() as stopped:
        try:
            starts = (
                Service.start("compiler", "compiler_service", compiler_environment),
                Service.start("runtime", "runtime_service", runtime_environment),
            )
            for start in asyncio.as_completed(starts):
                services.append(await start)
            by_name = {s.name: s for s in services}
            ready = {f"{name}_address": by_name[name].address for name in ("compiler", "runtime")}
            print(json.dumps({"ready": True} | ready | {"data": str(directory), "pid": os.getpid()}), flush=True)
            ends = {asyncio.create_task(s.process.wait()): s for s in services}
            stop = asyncio.create_task(stopped.wait())
            done, _ = await asyncio.wait({stop, *ends}, return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            dead = [ends[task] for task in done if task in ends]
            if dead and not stopped.is_set():
                raise Unavailable(f"the {dead[0].name} service ended with exit code {dead[0].process.returncode}; its log is above")
        finally:
            await asyncio.gather(*(_end(s.process) for s in services))

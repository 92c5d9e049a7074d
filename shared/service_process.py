"""Services as child processes: started, awaited until they serve, watched, ended. `quire up` and the front of replicas run them."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shared.errors import FieldOutOfRange, Unavailable
from shared.service_main import BAD_INPUT


@dataclass(slots=True)
class ServiceProcess:
    """`name` is what messages call it. `address` is where it serves, once it is ready: its one JSON line on standard output."""

    name: str
    process: asyncio.subprocess.Process
    address: str = ""

    @classmethod
    async def start(cls, name: str, module: str, environment: Mapping[str, str]) -> ServiceProcess:
        """`python -m module` with exactly `environment`."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            env=dict(environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )
        return cls(name, process)

    async def ready(self, timeout_s: float) -> None:
        """Returns once it serves at `address`; FieldOutOfRange where it refuses its settings, Unavailable where it ends otherwise
        or takes too long."""
        assert self.process.stdout is not None
        try:
            line = await asyncio.wait_for(self.process.stdout.readline(), timeout_s)
        except TimeoutError:
            raise Unavailable(f"the {self.name} was not ready within {timeout_s:.0f} s; its log is above") from None
        if not line:
            code = await self.process.wait()
            kind = FieldOutOfRange if code == BAD_INPUT else Unavailable
            raise kind(f"the {self.name} ended with exit code {code} before it was ready; its log is above")
        self.address = str(json.loads(line)["address"])

    async def end(self, grace_s: float) -> None:
        """SIGTERM, `grace_s` to drain, then SIGKILL."""
        if self.process.returncode is not None:
            return
        self.process.terminate()
        try:
            await asyncio.wait_for(self.process.wait(), grace_s)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()


async def all_ready(stopped: asyncio.Event, services: Sequence[ServiceProcess], timeout_s: float) -> bool:
    """Whether every service serves now; False where `stopped` was set before. Errors as for `ready`."""
    stop = asyncio.create_task(stopped.wait())
    ready = asyncio.gather(*(service.ready(timeout_s) for service in services))
    await asyncio.wait((stop, ready), return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if stopped.is_set():
        ready.cancel()
        await asyncio.gather(ready, return_exceptions=True)
        return False
    await ready
    return True


async def until_one_ends(stopped: asyncio.Event, services: Sequence[ServiceProcess]) -> None:
    """Returns when `stopped` is set; Unavailable when a service has ended by itself."""
    tasks = [asyncio.create_task(stopped.wait()), *(asyncio.create_task(service.process.wait()) for service in services)]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    dead = [service for service in services if service.process.returncode is not None]
    if dead and not stopped.is_set():
        raise Unavailable(f"the {dead[0].name} ended with exit code {dead[0].process.returncode}; its log is above")

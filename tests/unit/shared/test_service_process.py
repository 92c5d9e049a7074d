"""Services as child processes: who is ready, who is not, and that whoever was started is ended."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.errors import Unavailable
from shared.service_process import ServiceProcess, all_ready, until_one_ends

SAYS_WHERE = 'import time\nprint(\'{"address": "127.0.0.1:7"}\', flush=True)\ntime.sleep(600)\n'
SILENT = "import time\ntime.sleep(600)\n"
DEAF = f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{SAYS_WHERE}"


class Starter:
    """Starts modules written here; ends them all."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.started = directory, list[ServiceProcess]()

    async def __call__(self, name: str, code: str) -> ServiceProcess:
        (self.directory / f"{name}_service.py").write_text(code)
        environment = os.environ | {"PYTHONPATH": str(self.directory)}
        self.started.append(await ServiceProcess.start(f"{name} service", f"{name}_service", environment))
        return self.started[-1]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Starter]:
    starter = Starter(tmp_path)
    yield starter
    await asyncio.gather(*(service.end(10.0) for service in starter.started))


async def test_they_are_ready_once_each_has_said_where_it_serves(start: Starter) -> None:
    services = [await start("one", SAYS_WHERE), await start("two", SAYS_WHERE)]
    assert await all_ready(asyncio.Event(), services, 60.0)
    assert [service.address for service in services] == ["127.0.0.1:7"] * 2


async def test_one_that_says_nothing_is_waited_for_so_long_and_named(start: Starter) -> None:
    services = [await start("one", SAYS_WHERE), await start("mute", SILENT)]
    with pytest.raises(Unavailable, match="the mute service was not ready within 0 s"):
        await all_ready(asyncio.Event(), services, 0.2)


async def test_whoever_is_told_to_stop_meanwhile_waits_no_longer(start: Starter) -> None:
    services, stopped = [await start("mute", SILENT)], asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, stopped.set)
    assert not await all_ready(stopped, services, 600.0)


async def test_one_that_ends_by_itself_is_named_with_its_exit_code(start: Starter) -> None:
    services = [await start("one", SAYS_WHERE), await start("brief", "raise SystemExit(3)")]
    with pytest.raises(Unavailable, match="the brief service ended with exit code 3; its log is above"):
        await until_one_ends(asyncio.Event(), services)


async def test_one_that_is_deaf_to_sigterm_is_killed(start: Starter) -> None:
    service = await start("deaf", DEAF)
    await service.ready(60.0)
    await service.end(0.1)
    assert service.process.returncode == -9

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from shared.jobs.queue import JobQueue
from tests.support.job_queues import Backend, ManualClock, redis_backend, sqlite_backend
from tests.support.redis_server import RedisServer


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.close()


@pytest.fixture(params=["sqlite", "redis"])
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Backend]:
    """The suite runs once on each."""
    if request.param == "sqlite":
        made = sqlite_backend(tmp_path / "queue.db")
    else:
        made = redis_backend(request.getfixturevalue("redis_server"))
    yield made
    await made.close()


@pytest.fixture
async def queue(backend: Backend) -> JobQueue:
    return await backend.open()


@pytest.fixture
def clock(backend: Backend) -> ManualClock:
    return backend.clock

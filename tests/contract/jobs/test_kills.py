"""kill -9 at random moments of workers and of redis-server, with jobs waiting, running, publishing and being cancelled.

Every accepted job ends exactly once, watchers resume without gaps, no artifact is half published or published twice. The
number of kills comes from QUIRE_KILL_ROUNDS (a few by default; `make soak` asks for 200).
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.artifacts.local import LocalStore
from shared.errors import StoreUnavailable
from shared.jobs.job import JobEvent, JobState
from shared.jobs.queue import JobQueue
from tests.support.job_queues import Backend, history, redis_backend, sqlite_backend, submit
from tests.support.queue_process import FAST
from tests.support.redis_server import RedisServer

ROUNDS = int(os.environ.get("QUIRE_KILL_ROUNDS", "4"))
WORKERS = 2


class Replicas:
    """Worker processes that are replaced when they are killed."""

    def __init__(self, location: str, store: Path, log: Path) -> None:
        self._command = [sys.executable, "-m", "tests.support.queue_process", location, "serve", str(store)]
        self._log = log.open("ab")
        self.running = [self._start() for _ in range(WORKERS)]

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, stdout=self._log)

    def kill_one(self) -> None:
        victim = random.randrange(WORKERS)
        self._end(self.running[victim])
        self.running[victim] = self._start()

    def close(self) -> None:
        for process in self.running:
            self._end(process)
        self._log.close()

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        assert process.poll() is None, "a worker died by itself"
        process.kill()
        process.wait()


class Client:
    """Submits, watches and cancels, and repeats itself when the queue was away."""

    def __init__(self, queue: JobQueue) -> None:
        self._queue = queue
        self.seen: dict[str, list[JobEvent]] = {}
        self._watching: list[asyncio.Task[None]] = []

    async def submit(self, request: str, digest: str) -> None:
        while True:
            try:
                job_id = (await submit(self._queue, request, digest, max_attempts=20)).job.job_id
                break
            except StoreUnavailable:
                await asyncio.sleep(0.05)
        if job_id not in self.seen:
            self.seen[job_id] = []
            self._watching.append(asyncio.create_task(self._watch(job_id)))

    async def cancel_some(self) -> None:
        try:
            await self._queue.cancel(random.choice(list(self.seen)))
        except StoreUnavailable:
            await asyncio.sleep(0)  # nothing was promised

    async def _watch(self, job_id: str) -> None:
        seen = self.seen[job_id]
        while not (seen and seen[-1].state.is_terminal):
            try:
                async for event in self._queue.watch(job_id, after_sequence=len(seen)):
                    seen.append(event)
            except StoreUnavailable:
                await asyncio.sleep(0.05)

    async def all_ended(self) -> None:
        await asyncio.gather(*self._watching)


@pytest.fixture(params=["sqlite", "redis"])
async def setting(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[Backend, RedisServer | None]]:
    server = RedisServer() if request.param == "redis" else None
    backend = redis_backend(server) if server else sqlite_backend(tmp_path / "queue.db")
    yield backend, server
    await backend.close()
    if server:
        server.close()


@pytest.mark.timeout(300 + 5 * ROUNDS)
async def test_nothing_is_lost_or_done_twice_whoever_is_killed(setting: tuple[Backend, RedisServer | None], tmp_path: Path) -> None:
    backend, server = setting
    queue = await backend.open(FAST, real_time=True)
    client, store = Client(queue), LocalStore(tmp_path / "store")
    replicas = Replicas(backend.location, tmp_path / "store", tmp_path / "log")
    for number in range(ROUNDS):
        for half in range(4):
            await client.submit(f"r-{number}-{half}", f"d-{number}-{half // 2}")  # half of them duplicates
        await client.cancel_some()
        await asyncio.sleep(random.random() * 2)  # starting up takes a worker about one second
        if server is not None and number % 2:
            server.kill()
            await asyncio.sleep(random.random() / 4)
            await asyncio.to_thread(server.start)
        else:
            replicas.kill_one()
    await asyncio.wait_for(client.all_ended(), 240)
    replicas.close()

    published = [line.split()[1] for line in (tmp_path / "log").read_text().splitlines() if line.startswith("published ")]
    assert len(published) == len(set(published)), "an artifact was published twice"
    succeeded = set()
    for job_id, events in client.seen.items():
        job = await queue.get(job_id)
        assert events == await history(queue, job_id)
        assert [event.sequence for event in events] == list(range(1, job.last_sequence + 1))
        assert [event.state.is_terminal for event in events].count(True) == 1
        assert events[-1].state is job.state
        if job.state is JobState.SUCCEEDED:
            assert job.artifact_id == hashlib.sha256(job.spec_digest.encode()).hexdigest()
            succeeded.add(job.artifact_id)
    assert succeeded, "the workers got something done between the kills"
    assert succeeded <= {info.artifact_id for info in store.list("model")}
    for info in store.list():
        store.verify(info.artifact_id)
    counts = await queue.count()
    assert sum(counts.values()) == len(client.seen)
    assert all(state.is_terminal for state, number in counts.items() if number)

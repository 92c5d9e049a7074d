"""A real queue and real processes that only pretend to build."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from compiler_service.worker.build_process import Launcher
from compiler_service.worker.record import AttemptRecord
from compiler_service.worker.worker import BuildPaths, Worker
from shared.artifacts.locate import StoreLocation
from shared.jobs.job import Job, JobEvent, JobLimits
from shared.jobs.queue import QueuePolicy
from shared.jobs.sqlite import SQLiteQueue

FAKE = (sys.executable, "-m", "tests.support.fake_build")
POLICY = QueuePolicy(lease_s=30.0, retry_delay_s=0.01, max_retry_delay_s=0.02)


@dataclass
class Bench:
    """A queue, and workers that are stopped when the test ends."""

    directory: Path
    queue: SQLiteQueue
    workers: list[tuple[Worker, asyncio.Task[None]]] = field(default_factory=list)
    records: list[AttemptRecord] = field(default_factory=list)
    number: int = 0

    def start_worker(self) -> Worker:
        launcher = Launcher(self.directory / "builds", FAKE)
        paths = BuildPaths(StoreLocation("store", "", 0), "digests", ("/models",))
        worker = Worker(self.queue, f"worker-{len(self.workers)}", launcher, paths, self.records.append)
        self.workers.append((worker, asyncio.create_task(worker.run())))
        return worker

    async def stop(self) -> None:
        for worker, _ in self.workers:
            worker.stop()
        await asyncio.gather(*(task for _, task in self.workers))

    async def submit(self, *, limits: JobLimits | None = None, **plan: Any) -> Job:
        self.number += 1
        spec = json.dumps(plan).encode()
        submission = await self.queue.submit(
            request_id=f"request-{self.number}", spec=spec, spec_digest=f"{self.number:064x}", limits=limits or JobLimits()
        )
        return submission.job

    async def end_of(self, job: Job) -> tuple[Job, list[JobEvent]]:
        """The job and its whole history once it has ended."""
        events = [event async for event in self.queue.watch(job.job_id)]
        return await self.queue.get(job.job_id), events

    async def until(self, condition) -> Any:
        """Wait for what `condition` (a coroutine function or a function) says."""
        async with asyncio.timeout(60):
            while True:
                value = condition()
                value = await value if asyncio.iscoroutine(value) else value
                if value:
                    return value
                await asyncio.sleep(0.02)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    queue = SQLiteQueue(tmp_path / "jobs.sqlite", POLICY)
    made = Bench(tmp_path, queue)
    yield made
    await made.stop()
    await queue.close()
    assert not list((tmp_path / "builds").glob("*.tmp")), "scratch is left behind"

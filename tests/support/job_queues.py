"""What tests of the job queue share: both backends on a clock to turn by hand, and short-hands for verbs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import redis

from shared.jobs.job import Claim, Job, JobError, JobEvent, JobLimits, JobState, Outcome
from shared.jobs.queue import JobQueue, QueuePolicy, Submission
from shared.jobs.redis import RedisQueue
from shared.jobs.sqlite import SQLiteQueue
from tests.support.redis_server import RedisServer

ARTIFACT = "a" * 64
SUCCEEDED = Outcome(JobState.SUCCEEDED, artifact_id=ARTIFACT)
ERROR = JobError(reason="BUILD_FAILED", message="the compiler crashed")
FAILED = Outcome(JobState.FAILED, error=ERROR)
CANCELLED = Outcome(JobState.CANCELLED)


@dataclass
class ManualClock:
    now: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Backend:
    """One storage of jobs. Every `open` is what another process would see; it runs on the manual clock unless told otherwise."""

    name: str
    location: str
    connect: Callable[[QueuePolicy, ManualClock | None], Awaitable[JobQueue]]
    clock: ManualClock = field(default_factory=ManualClock)
    opened: list[JobQueue] = field(default_factory=list)

    async def open(self, policy: QueuePolicy | None = None, *, real_time: bool = False) -> JobQueue:
        queue = await self.connect(policy or QueuePolicy(), None if real_time else self.clock)
        self.opened.append(queue)
        return queue

    async def close(self) -> None:
        for queue in self.opened:
            await queue.close()


def sqlite_backend(path: Path) -> Backend:
    async def connect(policy: QueuePolicy, clock: ManualClock | None) -> JobQueue:
        return SQLiteQueue(path, policy) if clock is None else SQLiteQueue(path, policy, clock)

    return Backend("sqlite", str(path), connect)


def redis_backend(server: RedisServer) -> Backend:
    """On `server`, which is emptied first."""

    async def connect(policy: QueuePolicy, clock: ManualClock | None) -> JobQueue:
        return await RedisQueue.connect(server.url, policy, clock=clock)

    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    return Backend("redis", server.url, connect)


async def submit(
    queue: JobQueue, request: str = "request", digest: str = "digest", *, reuse_finished: bool = True, **limits: float
) -> Submission:
    """The spec says no more than its digest."""
    spec = f'{{"a":"{digest}"}}'.encode()
    bounds = JobLimits(**limits)  # type: ignore[arg-type]
    return await queue.submit(request_id=request, spec=spec, spec_digest=digest, limits=bounds, reuse_finished=reuse_finished)


async def claim(queue: JobQueue, worker: str = "worker-1") -> Claim:
    claimed = await queue.claim(worker)
    assert claimed is not None, "a job was there to be claimed"
    return claimed


async def succeed(queue: JobQueue, claimed: Claim) -> Job:
    await queue.begin_publish(claimed.token)
    return await queue.finish(claimed.token, SUCCEEDED)


async def history(queue: JobQueue, job_id: str, after_sequence: int = 0) -> list[JobEvent]:
    """All events of a job that has ended."""
    return [event async for event in queue.watch(job_id, after_sequence=after_sequence)]

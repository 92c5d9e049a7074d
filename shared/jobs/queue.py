"""The contract of a job queue, whatever stores it.

A job is executed at least once and ends exactly once. An accepted job is never lost and always reaches a terminal state: a
worker that dies lets its lease lapse, which counts as an attempt; attempts, waiting and running are bounded by the job's
limits. Of two workers that believe they have a job, only the holder of the newest fencing token can change it.

    submit ─► QUEUED ─claim─► RUNNING ─begin_publish─► PUBLISHING ─finish─► SUCCEEDED
                ▲                │                         │           └──► FAILED, CANCELLED, TIMED_OUT
                └── fail_attempt, release, lapsed lease ───┘           (attempts used up: DEAD_LETTERED)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import structlog

from shared.errors import StoreUnavailable
from shared.jobs.job import Claim, FencingToken, HeartbeatAnswer, Job, JobError, JobEvent, JobLimits, JobState, Outcome

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """What holds for all jobs of a queue.

    A failed attempt waits `retry_delay_s`, twice that after the next, up to `max_retry_delay_s`. Terminal jobs are forgotten
    with their history after `retention_s`.
    """

    lease_s: float = 30.0
    retry_delay_s: float = 5.0
    max_retry_delay_s: float = 300.0
    retention_s: float = 7 * 86400.0
    max_queued: int = 1000

    def retry_delay(self, attempt: int) -> float:
        """Seconds to wait after attempt number `attempt` (from 1) failed."""
        return min(self.retry_delay_s * 2.0 ** (attempt - 1), self.max_retry_delay_s)


@dataclass(frozen=True, slots=True)
class Submission:
    """`created` is False where an earlier job answers the request."""

    job: Job
    created: bool


@dataclass(frozen=True, slots=True)
class JobPage:
    """Newest first. `next_page_token` is empty on the last page."""

    jobs: tuple[Job, ...]
    next_page_token: str


@dataclass(frozen=True, slots=True)
class ReclaimReport:
    """Jobs that one pass moved. `lapsed` leases include those that were `dead_lettered`; `expired` waited too long."""

    lapsed: int = 0
    expired: int = 0
    dead_lettered: int = 0
    forgotten: int = 0


class JobQueue(Protocol):
    """Every method may raise StoreUnavailable; calls with a token raise JobStateConflict if it is not the job's newest."""

    async def submit(
        self,
        *,
        request_id: str,
        spec: bytes,
        spec_digest: str,
        limits: JobLimits,
        reuse_finished: bool = True,
        traceparent: str = "",
    ) -> Submission:
        """Accept a job, durably. `spec` is UTF-8, opaque to the queue.

        The same `request_id` gives the same job for ever, whoever is asked; with another `spec` it is DuplicateRequest. A job
        of the same `spec_digest` (the spec, its source, the builder) that waits, runs or has succeeded answers a new request as
        well (single flight). Whether its artifact still exists is for the caller to see, who then submits again with
        `reuse_finished=False`. QueueFull when too many wait. `traceparent` is kept with a job that is made, for the spans of
        its attempts.
        """
        ...

    async def claim(self, worker: str, *, wait_s: float = 0.0) -> Claim | None:
        """The oldest job that may run, leased to `worker`; waits up to `wait_s` seconds for one. None if there is none."""
        ...

    async def heartbeat(self, token: FencingToken) -> HeartbeatAnswer:
        """Renew the lease and learn whether to go on. Never raises JobStateConflict: a lost claim is an answer."""
        ...

    async def record_event(
        self, token: FencingToken, *, stage: str, fraction: float = 0.0, message: str = "", rss_bytes: int = 0
    ) -> None:
        """Add progress to the history, up to a bounded number of lines; later ones are dropped, state changes never are."""
        ...

    async def begin_publish(self, token: FencingToken) -> None:
        """RUNNING to PUBLISHING, the point of no return: Cancelled if a cancel came first. Later ones do not undo a publication;
        the attempt's time goes on."""
        ...

    async def finish(self, token: FencingToken, outcome: Outcome) -> Job:
        """End the job. A cancel that came before `begin_publish` wins over the outcome. Repeating the same call is harmless."""
        ...

    async def fail_attempt(self, token: FencingToken, error: JobError) -> Job:
        """This attempt failed in a way the next one may not: retry later, dead-letter after the last attempt."""
        ...

    async def release(self, token: FencingToken) -> Job:
        """Give the job back unharmed, for the next worker to claim at once; the attempt does not count."""
        ...

    async def cancel(self, job_id: str) -> Job:
        """A waiting job ends at once, a running one as soon as its worker hears of it. Idempotent. JobNotFound."""
        ...

    async def get(self, job_id: str) -> Job:
        """JobNotFound."""
        ...

    async def list(self, *, states: Collection[JobState] = (), page_size: int = 50, page_token: str = "") -> JobPage:
        """Newest first; all states if none is named. FieldOutOfRange for a page size outside 1..500 or a token not ours."""
        ...

    async def count(self) -> Mapping[JobState, int]:
        """Remembered jobs in each state, every state present."""
        ...

    def watch(self, job_id: str, *, after_sequence: int = 0) -> AsyncIterator[JobEvent]:
        """Every event after `after_sequence` in order and without gaps; ends behind the terminal one. JobNotFound."""
        ...

    async def reclaim(self) -> ReclaimReport:
        """One pass of house-keeping: lapsed leases, waits too long, old jobs. Any number of processes may run it."""
        ...

    async def close(self) -> None: ...


async def reclaim_forever(queue: JobQueue, every_s: float, on_report: Callable[[ReclaimReport], None]) -> None:
    """Run `reclaim` every `every_s` seconds until cancelled. Each process that works for a queue runs one."""
    while True:
        try:
            report = await queue.reclaim()
        except StoreUnavailable as error:
            _log.warning("job queue not reclaimed", error=str(error))
        else:
            on_report(report)
            if report != ReclaimReport():
                _log.info("job queue reclaimed", lapsed=report.lapsed, expired=report.expired, dead_lettered=report.dead_lettered)
        await asyncio.sleep(every_s)

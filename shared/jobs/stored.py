"""The queue contract on top of a few storage primitives: every verb is load, decide (lifecycle), compare and swap.

A backend stores job records and their events and promises that `_insert`, `_commit` and `_forget` are atomic and durable. The
rules live once, in shared/jobs/lifecycle.py; nothing here or below decides what may become of a job.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import structlog

from shared.errors import FieldOutOfRange, InternalError, JobNotFound
from shared.ids import JobId, check_name, new_id
from shared.jobs import lifecycle
from shared.jobs.job import Claim, FencingToken, HeartbeatAnswer, Job, JobError, JobEvent, JobLimits, JobState, Outcome, decode_job
from shared.jobs.lifecycle import Change
from shared.jobs.queue import JobPage, QueuePolicy, ReclaimReport, Submission

POLL_S = 0.1
"""How often a watcher, or a worker that waits, looks again where the backend cannot wake it."""
MAX_PAGE_SIZE = 500

_log = structlog.get_logger(__name__)


class StoredQueue(ABC):
    """JobQueue by compare and swap on one record."""

    def __init__(self, policy: QueuePolicy) -> None:
        self._policy = policy

    # Storage

    @abstractmethod
    async def _now(self) -> float:
        """Unix seconds, the same for all processes on this queue."""

    @abstractmethod
    async def _insert(self, change: Change, *, reuse_finished: bool) -> Submission:
        """Store a new job, unless its request or its spec has one already. DuplicateRequest, QueueFull."""

    @abstractmethod
    async def _load(self, job_id: str) -> Job | None: ...

    @abstractmethod
    async def _commit(self, change: Change) -> bool:
        """Store the job and append its events if the stored revision is `change.job.revision - 1`; else change nothing, False."""

    @abstractmethod
    async def _forget(self, job: Job) -> bool:
        """Remove a job, its events and its requests, if it is still at its revision."""

    @abstractmethod
    async def _take(self, worker: str, wait_s: float) -> Job | None:
        """A QUEUED and available job, oldest first. None after at most `wait_s`, or earlier."""

    @abstractmethod
    async def _repair(self, now: float) -> None:
        """Make what can be claimed agree with the records, where a backend keeps both."""

    @abstractmethod
    async def _due(self, now: float) -> Sequence[str]:
        """Ids of jobs whose `due_s` is not after `now`, and of those that a clock set back has left behind, if it can tell."""

    @abstractmethod
    async def _page(self, states: Collection[JobState], before: int | None, limit: int) -> Sequence[tuple[int, bytes]]:
        """Up to `limit` job records with their numbers, newest first, numbered below `before`."""

    @abstractmethod
    async def _events(self, job_id: str, after_sequence: int) -> Sequence[JobEvent]: ...

    @abstractmethod
    async def count(self) -> Mapping[JobState, int]: ...

    @abstractmethod
    async def close(self) -> None: ...

    # The contract (shared/jobs/queue.py)

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
        check_name(request_id, field="request_id")
        check_name(spec_digest, field="spec_digest")
        now = await self._now()
        job = Job(
            job_id=JobId(new_id()),
            request_id=request_id,
            spec=_utf8(spec),
            spec_digest=spec_digest,
            limits=limits,
            state=JobState.QUEUED,
            created_s=now,
            available_s=now,
            traceparent=traceparent,
        )
        return await self._insert(lifecycle.submitted(job), reuse_finished=reuse_finished)

    async def claim(self, worker: str, *, wait_s: float = 0.0) -> Claim | None:
        check_name(worker, field="worker")
        deadline = time.monotonic() + wait_s
        while True:
            job = await self._take(worker, max(deadline - time.monotonic(), 0.0))
            if job is not None:
                now = await self._now()
                if lifecycle.due_s(job, self._policy) <= now:
                    await self._commit(_next_revision(lifecycle.overdue(job, now, self._policy)))
                    continue
                change = _next_revision(lifecycle.claimed(job, worker, now, self._policy))
                if await self._commit(change):
                    return Claim(job=change.job, lease_s=self._policy.lease_s)
            elif time.monotonic() >= deadline:
                return None

    async def heartbeat(self, token: FencingToken) -> HeartbeatAnswer:
        answer = HeartbeatAnswer.LOST

        def decide(job: Job, now: float) -> Change:
            nonlocal answer
            change, answer = lifecycle.heartbeat(job, token, now, self._policy)
            return change

        try:
            await self._update(token.job_id, decide)
        except JobNotFound:
            return HeartbeatAnswer.LOST
        return answer

    async def record_event(
        self, token: FencingToken, *, stage: str, fraction: float = 0.0, message: str = "", rss_bytes: int = 0
    ) -> None:
        await self._update(
            token.job_id,
            lambda job, now: lifecycle.progressed(
                job, token, now, stage=stage, fraction=fraction, message=message, rss_bytes=rss_bytes
            ),
        )

    async def begin_publish(self, token: FencingToken) -> None:
        await self._update(token.job_id, lambda job, now: lifecycle.publishing(job, token, now, self._policy))

    async def finish(self, token: FencingToken, outcome: Outcome) -> Job:
        return await self._update(token.job_id, lambda job, now: lifecycle.finished(job, token, outcome, now))

    async def fail_attempt(self, token: FencingToken, error: JobError) -> Job:
        return await self._update(token.job_id, lambda job, now: lifecycle.failed_attempt(job, token, error, now, self._policy))

    async def release(self, token: FencingToken) -> Job:
        return await self._update(token.job_id, lambda job, now: lifecycle.released(job, token, now))

    async def cancel(self, job_id: str) -> Job:
        return await self._update(job_id, lifecycle.cancelled)

    async def get(self, job_id: str) -> Job:
        job = await self._load(job_id)
        if job is None:
            raise JobNotFound(f"no job {job_id[:64]!r}: it never was, or it ended longer ago than this queue remembers")
        return job

    async def list(self, *, states: Collection[JobState] = (), page_size: int = 50, page_token: str = "") -> JobPage:
        if not 1 <= page_size <= MAX_PAGE_SIZE:
            raise FieldOutOfRange(f"page_size must be 1 to {MAX_PAGE_SIZE}; got {page_size}", field="page_size")
        if page_token and not (page_token.isascii() and page_token.isdigit() and len(page_token) <= 18):
            raise FieldOutOfRange(f"page_token must come from the page before; got {page_token[:64]!r}", field="page_token")
        rows = await self._page(states, int(page_token) if page_token else None, page_size + 1)
        token = str(rows[page_size - 1][0]) if len(rows) > page_size else ""
        return JobPage(jobs=tuple(readable(record for _, record in rows[:page_size])), next_page_token=token)

    async def watch(self, job_id: str, *, after_sequence: int = 0) -> AsyncIterator[JobEvent]:
        sequence = after_sequence
        while True:
            job = await self.get(job_id)  # before the events, so that a terminal job's are all there
            if job.last_sequence > sequence:
                for event in await self._events(job_id, sequence):
                    yield event
                    sequence = event.sequence
            if job.state.is_terminal:
                return
            await asyncio.sleep(POLL_S)

    async def reclaim(self) -> ReclaimReport:
        tally: Counter[str] = Counter()
        for job_id in await self._due(await self._now()):
            try:
                tally.update(await self._settle(job_id))
            except InternalError as error:  # one damaged record must not keep the others from being recovered
                _log.error("job not reclaimed", job_id=job_id, error=error.message)
        await self._repair(await self._now())
        return ReclaimReport(**tally)

    async def _settle(self, job_id: str) -> tuple[str, ...]:
        """Do what is due for one job; the fields of the report that count it."""
        job, now = await self._load(job_id), await self._now()
        if job is None:
            return ()
        rewound = lifecycle.rewound(job, now, self._policy)
        if rewound.job is not job:
            await self._commit(_next_revision(rewound))
            return ()
        if lifecycle.due_s(job, self._policy) > now:
            return ()
        if job.state.is_terminal:
            return ("forgotten",) if await self._forget(job) else ()
        change = _next_revision(lifecycle.overdue(job, now, self._policy))
        if not await self._commit(change):
            return ()
        if job.state is JobState.QUEUED:
            return ("expired",)
        return ("lapsed", "dead_lettered") if change.job.state is JobState.DEAD_LETTERED else ("lapsed",)

    async def _update(self, job_id: str, decide: Callable[[Job, float], Change]) -> Job:
        while True:
            job = await self.get(job_id)
            change = decide(job, await self._now())
            if change.job is job:
                return job
            change = _next_revision(change)
            if await self._commit(change):
                return change.job


def readable(records: Iterable[bytes]) -> Iterator[Job]:
    """The jobs among `records`; one that cannot be read is logged and left for a newer version, never in the way of others."""
    for record in records:
        try:
            yield decode_job(record)
        except InternalError as error:
            _log.error("job record skipped", error=error.message)


def _next_revision(change: Change) -> Change:
    return replace(change, job=replace(change.job, revision=change.job.revision + 1))


def _utf8(spec: bytes) -> bytes:
    try:
        spec.decode()
    except UnicodeDecodeError as error:
        raise FieldOutOfRange(f"spec must be UTF-8; {error}", field="spec") from error
    return spec

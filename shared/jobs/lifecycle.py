"""What may become of a job: pure decisions over one job record, the same for every backend.

Each returns the job as it should be stored next and the events that tell of it; the unchanged job if there is nothing to do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from shared.errors import BuildFailed, Cancelled, JobStateConflict, QueueTimeout
from shared.jobs.job import FencingToken, HeartbeatAnswer, Job, JobError, JobEvent, JobState, Outcome
from shared.jobs.queue import QueuePolicy
from shared.text import clip

MAX_EVENTS = 2000
"""Progress beyond this many events of a job is not kept."""


@dataclass(frozen=True, slots=True)
class Change:
    job: Job
    events: tuple[JobEvent, ...] = ()


def due_s(job: Job, policy: QueuePolicy) -> float:
    """When house-keeping must look at the job: its wait, its lease or its retention is over then."""
    if job.state is JobState.QUEUED:
        return job.available_s + job.limits.max_pending_s
    if job.state.is_terminal:
        return (job.finished_s or 0.0) + policy.retention_s
    return job.lease_expires_s or 0.0


def is_joinable(job: Job) -> bool:
    """Whether a new request for the same spec may be answered by this job."""
    return not job.cancel_requested and (not job.state.is_terminal or job.state is JobState.SUCCEEDED)


def submitted(job: Job) -> Change:
    return _step(job, job.created_s, "accepted")


def claimed(job: Job, worker: str, now: float, policy: QueuePolicy) -> Change:
    """QUEUED and available to RUNNING."""
    assert job.state is JobState.QUEUED, job.state
    return _step(
        job,
        now,
        f"attempt {job.attempt + 1} of {job.limits.max_attempts} by {worker}",
        state=JobState.RUNNING,
        stage="",
        attempt=job.attempt + 1,
        fence=job.fence + 1,
        worker=worker,
        started_s=now,
        lease_expires_s=now + policy.lease_s,
    )


def heartbeat(job: Job, token: FencingToken, now: float, policy: QueuePolicy) -> tuple[Change, HeartbeatAnswer]:
    if not _holds(job, token):
        return Change(job), HeartbeatAnswer.LOST
    renewed = Change(replace(job, lease_expires_s=now + policy.lease_s))
    if job.cancel_requested and job.state is not JobState.PUBLISHING:
        return renewed, HeartbeatAnswer.CANCEL
    if now - (job.started_s or now) > job.limits.max_runtime_s:
        return renewed, HeartbeatAnswer.OVERDUE
    return renewed, HeartbeatAnswer.CONTINUE


def progressed(job: Job, token: FencingToken, now: float, *, stage: str, fraction: float, message: str, rss_bytes: int) -> Change:
    _check_holds(job, token)
    if job.last_sequence >= MAX_EVENTS:
        return Change(job)
    return _step(job, now, message, stage=clip(stage), fraction=min(max(fraction, 0.0), 1.0), rss_bytes=rss_bytes)


def publishing(job: Job, token: FencingToken, now: float, policy: QueuePolicy) -> Change:
    _check_holds(job, token)
    if job.state is JobState.PUBLISHING:
        return Change(job)
    if job.cancel_requested:
        raise Cancelled(f"job {job.job_id} was cancelled before its artifact was published")
    return _step(job, now, "publishing", state=JobState.PUBLISHING, lease_expires_s=now + policy.lease_s)


def finished(job: Job, token: FencingToken, outcome: Outcome, now: float) -> Change:
    if job.state.is_terminal and job.fence == token.fence and _ended_by(job, outcome):
        return Change(job)
    _check_holds(job, token)
    published = job.state is JobState.PUBLISHING and outcome.state is JobState.SUCCEEDED
    if job.cancel_requested and not published:
        return _ended(job, now, JobState.CANCELLED, "cancelled")
    message = outcome.error.message if outcome.error else str(outcome.state)
    return _ended(job, now, outcome.state, message, error=outcome.error, artifact_id=outcome.artifact_id, reused=outcome.reused)


def failed_attempt(job: Job, token: FencingToken, error: JobError, now: float, policy: QueuePolicy) -> Change:
    _check_holds(job, token)
    return _another_attempt(job, error, now, policy)


def released(job: Job, token: FencingToken, now: float) -> Change:
    _check_holds(job, token)
    if job.cancel_requested:
        return _ended(job, now, JobState.CANCELLED, "cancelled")
    return _requeued(job, now, f"given back by {job.worker}", available_s=now, attempt=job.attempt - 1)


def cancelled(job: Job, now: float) -> Change:
    if job.state.is_terminal or job.cancel_requested:
        return Change(job)
    if job.state is JobState.QUEUED:
        return _ended(job, now, JobState.CANCELLED, "cancelled before it ran", cancel_requested=True)
    return _step(job, now, "cancel requested", cancel_requested=True)


def overdue(job: Job, now: float, policy: QueuePolicy) -> Change:
    """A job whose `due_s` has passed and that is not terminal: waited too long, or its worker is gone."""
    if job.state is JobState.QUEUED:
        message = f"no worker was free for {job.limits.max_pending_s:g} s (limits.max_pending_s); add workers or raise it"
        waited_out = JobError(reason=QueueTimeout.reason, message=message, retryable=True)
        return _ended(job, now, JobState.TIMED_OUT, message, error=waited_out)
    message = (
        f"worker {job.worker} stopped renewing its lease in attempt {job.attempt} of {job.limits.max_attempts}, "
        f"stage {job.stage or 'none'}: it crashed, was killed or lost the queue"
    )
    details = {"cause": "WORKER_LOST", "worker": job.worker, "stage": job.stage}
    return _another_attempt(job, JobError(reason=BuildFailed.reason, message=message, details=details), now, policy)


def rewound(job: Job, now: float, policy: QueuePolicy) -> Change:
    """A job whose times lie further ahead than any that are set now: the clock was set back since. They are brought in, or nobody
    could claim the job, nor take it from a worker that is gone, before the clock is where it was."""
    available_s = min(job.available_s, now + policy.max_retry_delay_s) if job.state is JobState.QUEUED else job.available_s
    lease_expires_s = None if job.lease_expires_s is None else min(job.lease_expires_s, now + policy.lease_s)
    if (available_s, lease_expires_s) == (job.available_s, job.lease_expires_s):
        return Change(job)
    return Change(replace(job, available_s=available_s, lease_expires_s=lease_expires_s))


def _another_attempt(job: Job, error: JobError, now: float, policy: QueuePolicy) -> Change:
    if job.cancel_requested:
        return _ended(job, now, JobState.CANCELLED, "cancelled")
    if job.attempt >= job.limits.max_attempts:
        return _ended(job, now, JobState.DEAD_LETTERED, f"given up after {job.attempt} attempts: {error.message}", error=error)
    delay = policy.retry_delay(job.attempt)
    return _requeued(job, now, f"retry in {delay:g} s: {error.message}", available_s=now + delay, error=error)


def _requeued(job: Job, now: float, message: str, **changes: Any) -> Change:
    return _step(job, now, message, state=JobState.QUEUED, worker="", lease_expires_s=None, **changes)


def _ended(job: Job, now: float, state: JobState, message: str, **changes: Any) -> Change:
    return _step(job, now, message, state=state, lease_expires_s=None, finished_s=now, **changes)


def _step(job: Job, now: float, message: str, *, fraction: float = 0.0, rss_bytes: int = 0, **changes: Any) -> Change:
    """The job with `changes`, and the event that tells of them."""
    changed = replace(job, last_sequence=job.last_sequence + 1, **changes)
    event = JobEvent(
        sequence=changed.last_sequence,
        time_s=now,
        state=changed.state,
        stage=changed.stage,
        fraction=fraction,
        message=clip(message),
        rss_bytes=rss_bytes,
        attempt=changed.attempt,
    )
    return Change(changed, (event,))


def _holds(job: Job, token: FencingToken) -> bool:
    return job.fence == token.fence and job.state in (JobState.RUNNING, JobState.PUBLISHING)


def _check_holds(job: Job, token: FencingToken) -> None:
    if not _holds(job, token):
        raise JobStateConflict(
            f"claim {token.fence} of job {job.job_id} is over (newest is {job.fence}, job is {job.state}); drop the result",
            details={"fence": str(token.fence), "newest_fence": str(job.fence), "state": str(job.state)},
        )


def _ended_by(job: Job, outcome: Outcome) -> bool:
    return job.state in (outcome.state, JobState.CANCELLED) and job.artifact_id in (outcome.artifact_id, "")

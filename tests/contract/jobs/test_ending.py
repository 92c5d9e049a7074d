"""How jobs end: outcomes, retries, limits. Terminal states never change."""

from __future__ import annotations

import pytest

from shared.errors import JobNotFound, JobStateConflict
from shared.jobs.job import FencingToken, HeartbeatAnswer, Job, JobState, Outcome
from shared.jobs.queue import JobQueue, QueuePolicy
from tests.support.job_queues import (
    CANCELLED,
    ERROR,
    FAILED,
    SUCCEEDED,
    Backend,
    ManualClock,
    claim,
    history,
    submit,
    succeed,
)

TIMED_OUT = Outcome(JobState.TIMED_OUT, error=ERROR)


@pytest.mark.parametrize("outcome", [SUCCEEDED, FAILED, CANCELLED, TIMED_OUT], ids=lambda o: o.state)
async def test_a_worker_ends_its_job(queue: JobQueue, clock: ManualClock, outcome: Outcome) -> None:
    job_id = (await submit(queue)).job.job_id
    claimed = await claim(queue)
    clock.advance(3)
    job = await queue.finish(claimed.token, outcome)
    assert job == await queue.get(job_id)
    assert (job.state, job.artifact_id, job.error) == (outcome.state, outcome.artifact_id, outcome.error)
    assert (job.finished_s, job.lease_expires_s) == (clock.now, None)
    assert await queue.claim("w") is None


async def end(queue: JobQueue, clock: ManualClock, state: JobState) -> tuple[Job, FencingToken]:
    await submit(queue, max_attempts=1)
    claimed = await claim(queue)
    match state:
        case JobState.SUCCEEDED:
            return await succeed(queue, claimed), claimed.token
        case JobState.DEAD_LETTERED:
            return await queue.fail_attempt(claimed.token, ERROR), claimed.token
        case JobState.CANCELLED:
            return await queue.finish(claimed.token, CANCELLED), claimed.token
        case JobState.TIMED_OUT:
            return await queue.finish(claimed.token, TIMED_OUT), claimed.token
        case _:
            return await queue.finish(claimed.token, FAILED), claimed.token


@pytest.mark.parametrize("state", [state for state in JobState if state.is_terminal])
async def test_terminal_states_never_change(queue: JobQueue, clock: ManualClock, state: JobState) -> None:
    job, token = await end(queue, clock, state)
    assert job.state is state
    other = FAILED if state is JobState.SUCCEEDED else SUCCEEDED
    if state is JobState.CANCELLED:
        assert (await queue.finish(token, other)).state is JobState.CANCELLED, "a cancel that won is the worker's answer too"
    else:
        with pytest.raises(JobStateConflict):
            await queue.finish(token, other)
    for act in (queue.fail_attempt(token, ERROR), queue.release(token)):
        with pytest.raises(JobStateConflict):
            await act
    for late in (queue.begin_publish(token), queue.record_event(token, stage="build")):
        with pytest.raises(JobStateConflict):
            await late
    assert await queue.heartbeat(token) is HeartbeatAnswer.LOST
    assert await queue.cancel(job.job_id) == job
    clock.advance(10_000)
    await queue.reclaim()
    assert await queue.claim("w") is None
    assert await queue.get(job.job_id) == job


async def test_saying_the_same_end_twice_is_harmless(queue: JobQueue) -> None:
    """A worker whose answer got lost on the way repeats itself."""
    job_id = (await submit(queue)).job.job_id
    claimed = await claim(queue)
    first = await succeed(queue, claimed)
    assert await queue.finish(claimed.token, SUCCEEDED) == first
    assert len([e for e in await history(queue, job_id) if e.state.is_terminal]) == 1
    with pytest.raises(JobStateConflict):
        await queue.finish(claimed.token, Outcome(JobState.SUCCEEDED, artifact_id="b" * 64))


@pytest.mark.parametrize("verb", ["cancel", "get"])
async def test_an_unknown_job_is_said_to_be_unknown(queue: JobQueue, verb: str) -> None:
    for job_id in ("no-such-job", "", "x" * 100_000, "*", "a\nb"):
        with pytest.raises(JobNotFound):
            await getattr(queue, verb)(job_id)


async def test_failed_attempts_wait_twice_as_long_each_time_then_end_in_the_dead_letters(backend: Backend) -> None:
    queue = await backend.open(QueuePolicy(retry_delay_s=5, max_retry_delay_s=15))
    job_id = (await submit(queue, max_attempts=5)).job.job_id
    for delay in (5, 10, 15, 15):
        job = await queue.fail_attempt((await claim(queue)).token, ERROR)
        assert (job.state, job.available_s, job.error) == (JobState.QUEUED, backend.clock.now + delay, ERROR)
        backend.clock.advance(delay - 0.001)
        assert await queue.claim("w") is None
        backend.clock.advance(0.002)
    job = await queue.fail_attempt((await claim(queue)).token, ERROR)
    assert (job.job_id, job.state, job.attempt, job.error) == (job_id, JobState.DEAD_LETTERED, 5, ERROR)


async def test_a_job_waiting_for_its_retry_does_not_hold_up_others(queue: JobQueue) -> None:
    await submit(queue, "r-1", "d-1")
    await queue.fail_attempt((await claim(queue)).token, ERROR)
    other = await submit(queue, "r-2", "d-2")
    assert (await claim(queue)).job.job_id == other.job.job_id


async def test_success_after_a_failed_attempt_leaves_no_error(queue: JobQueue, clock: ManualClock) -> None:
    await submit(queue)
    await queue.fail_attempt((await claim(queue)).token, ERROR)
    clock.advance(10)
    job = await succeed(queue, await claim(queue))
    assert (job.state, job.attempt, job.error) == (JobState.SUCCEEDED, 2, None)


async def test_a_job_given_back_is_claimable_at_once_and_has_not_lost_an_attempt(queue: JobQueue) -> None:
    """A worker that drains must not use up the attempts of long builds."""
    await submit(queue, max_attempts=1)
    for _ in range(5):
        claimed = await claim(queue)
        assert claimed.job.attempt == 1
        job = await queue.release(claimed.token)
        assert (job.state, job.attempt) == (JobState.QUEUED, 0)
    assert claimed.job.fence == 5
    assert (await succeed(queue, await claim(queue))).state is JobState.SUCCEEDED


async def test_a_job_nobody_has_time_for_times_out(queue: JobQueue, clock: ManualClock) -> None:
    job_id = (await submit(queue, max_pending_s=60)).job.job_id
    clock.advance(59)
    assert (await queue.reclaim()).expired == 0
    clock.advance(2)
    assert (await queue.reclaim()).expired == 1
    job = await queue.get(job_id)
    assert (job.state, job.finished_s) == (JobState.TIMED_OUT, clock.now)
    assert job.error is not None
    assert job.error.reason == "QUEUE_TIMEOUT"
    assert await queue.claim("w") is None


async def test_a_job_that_waited_too_long_is_not_started_even_before_house_keeping(queue: JobQueue, clock: ManualClock) -> None:
    late = (await submit(queue, "r-1", "d-1", max_pending_s=60)).job.job_id
    clock.advance(61)
    fresh = (await submit(queue, "r-2", "d-2", max_pending_s=60)).job.job_id
    assert (await claim(queue)).job.job_id == fresh
    assert (await queue.get(late)).state is JobState.TIMED_OUT


async def test_an_attempt_that_takes_too_long_is_told_so(queue: JobQueue, clock: ManualClock) -> None:
    await submit(queue, max_runtime_s=50)
    claimed = await claim(queue)
    clock.advance(25)
    assert await queue.heartbeat(claimed.token) is HeartbeatAnswer.CONTINUE
    clock.advance(25.5)
    assert await queue.heartbeat(claimed.token) is HeartbeatAnswer.OVERDUE
    assert (await queue.finish(claimed.token, TIMED_OUT)).state is JobState.TIMED_OUT


async def test_a_publication_that_hangs_is_bounded_like_the_rest_of_the_attempt(queue: JobQueue, clock: ManualClock) -> None:
    await submit(queue, max_runtime_s=50)
    claimed = await claim(queue)
    clock.advance(40)
    await queue.begin_publish(claimed.token)
    assert await queue.heartbeat(claimed.token) is HeartbeatAnswer.CONTINUE
    clock.advance(10.5)
    assert await queue.heartbeat(claimed.token) is HeartbeatAnswer.OVERDUE
    job = await queue.finish(claimed.token, TIMED_OUT)
    assert (job.state, job.artifact_id) == (JobState.TIMED_OUT, "")


async def test_no_limit_but_the_documented_ones(queue: JobQueue, clock: ManualClock) -> None:
    """BR-133: a job retried for 30 hours and one that runs for 30 hours; attempts are kept, nothing expires by itself."""
    day = 86_400.0
    running = (await submit(queue, "r-1", "d-1", max_runtime_s=2 * day)).job.job_id
    claimed = await claim(queue, "long")
    retried = (await submit(queue, "r-2", "d-2", max_attempts=20, max_pending_s=2 * 3600)).job.job_id
    for hour in range(30):
        if hour % 2 == 0:
            other = await claim(queue, "short")
            assert (other.job.job_id, other.job.attempt) == (retried, hour // 2 + 1)
            await queue.fail_attempt(other.token, ERROR)
        clock.advance(3600)
        assert await queue.heartbeat(claimed.token) is HeartbeatAnswer.CONTINUE
        await queue.reclaim()
    assert (await queue.get(retried)).attempt == 15
    assert (await queue.get(running)).state is JobState.RUNNING
    assert (await succeed(queue, claimed)).job_id == running

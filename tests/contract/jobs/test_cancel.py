"""A cancel, whenever it comes, and who hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from shared.errors import Cancelled
from shared.jobs.job import FencingToken, HeartbeatAnswer, Job, JobState
from shared.jobs.queue import JobQueue
from tests.support.job_queues import (
    ARTIFACT,
    CANCELLED,
    ERROR,
    FAILED,
    SUCCEEDED,
    Backend,
    ManualClock,
    claim,
    submit,
)


async def test_cancelling_a_waiting_job_ends_it_at_once(queue: JobQueue) -> None:
    job_id = (await submit(queue)).job.job_id
    assert (await queue.cancel(job_id)).state is JobState.CANCELLED
    assert await queue.claim("w") is None
    assert (await queue.count())[JobState.QUEUED] == 0


async def test_cancelling_a_job_that_waits_for_its_retry_ends_it(queue: JobQueue, clock: ManualClock) -> None:
    job_id = (await submit(queue)).job.job_id
    await queue.fail_attempt((await claim(queue)).token, ERROR)
    await queue.cancel(job_id)
    clock.advance(10_000)
    assert await queue.claim("w") is None
    assert (await queue.get(job_id)).state is JobState.CANCELLED


async def test_cancelling_is_idempotent(queue: JobQueue) -> None:
    job_id = (await submit(queue)).job.job_id
    await claim(queue)
    first = await queue.cancel(job_id)
    assert (first.state, first.cancel_requested) == (JobState.RUNNING, True)
    assert await queue.cancel(job_id) == first


async def test_a_cancel_reaches_a_running_build_through_its_heartbeat(backend: Backend) -> None:
    worker, client = await backend.open(), await backend.open()
    job_id = (await submit(client)).job.job_id
    claimed = await claim(worker)
    assert await worker.heartbeat(claimed.token) is HeartbeatAnswer.CONTINUE
    await client.cancel(job_id)
    assert await worker.heartbeat(claimed.token) is HeartbeatAnswer.CANCEL
    assert await worker.heartbeat(claimed.token) is HeartbeatAnswer.CANCEL, "until the worker acts on it"
    assert (await worker.finish(claimed.token, CANCELLED)).state is JobState.CANCELLED


Act = Callable[[JobQueue, FencingToken], Awaitable[Job]]


@pytest.mark.parametrize(
    "act",
    [
        lambda queue, token: queue.finish(token, SUCCEEDED),
        lambda queue, token: queue.finish(token, FAILED),
        lambda queue, token: queue.fail_attempt(token, ERROR),
        lambda queue, token: queue.release(token),
    ],
    ids=["succeeded", "failed", "failed attempt", "given back"],
)
async def test_a_cancel_wins_over_whatever_the_worker_says_later(queue: JobQueue, act: Act) -> None:
    job_id = (await submit(queue)).job.job_id
    claimed = await claim(queue)
    await queue.cancel(job_id)
    job = await act(queue, claimed.token)
    assert (job.state, job.artifact_id) == (JobState.CANCELLED, "")


async def test_a_cancelled_job_may_not_begin_to_publish(queue: JobQueue) -> None:
    job_id = (await submit(queue)).job.job_id
    claimed = await claim(queue)
    await queue.cancel(job_id)
    with pytest.raises(Cancelled):
        await queue.begin_publish(claimed.token)
    assert (await queue.get(job_id)).state is JobState.RUNNING


async def test_a_cancel_after_the_point_of_no_return_does_not_undo_the_publication(queue: JobQueue) -> None:
    job_id = (await submit(queue)).job.job_id
    claimed = await claim(queue)
    await queue.begin_publish(claimed.token)
    await queue.begin_publish(claimed.token)
    assert (await queue.cancel(job_id)).state is JobState.PUBLISHING
    assert await queue.heartbeat(claimed.token) is HeartbeatAnswer.CONTINUE
    job = await queue.finish(claimed.token, SUCCEEDED)
    assert (job.state, job.artifact_id) == (JobState.SUCCEEDED, ARTIFACT)


async def test_a_cancel_during_a_publication_that_fails_still_counts(queue: JobQueue) -> None:
    job_id = (await submit(queue)).job.job_id
    claimed = await claim(queue)
    await queue.begin_publish(claimed.token)
    await queue.cancel(job_id)
    assert (await queue.fail_attempt(claimed.token, ERROR)).state is JobState.CANCELLED


async def test_a_cancel_wins_over_the_redelivery_of_a_dead_workers_job(queue: JobQueue, clock: ManualClock) -> None:
    """BR-137: three workers die of it; it is cancelled during the second attempt."""
    job_id = (await submit(queue)).job.job_id
    await claim(queue, "w-1")
    clock.advance(100)
    await queue.reclaim()
    clock.advance(100)
    await claim(queue, "w-2")
    await queue.cancel(job_id)
    clock.advance(100)
    await queue.reclaim()
    job = await queue.get(job_id)
    assert (job.state, job.attempt) == (JobState.CANCELLED, 2)
    clock.advance(100)
    assert await queue.claim("w-3") is None


async def test_a_cancel_and_a_claim_at_once_leave_a_job_that_ends(backend: Backend) -> None:
    worker, client = await backend.open(), await backend.open()
    for number in range(20):
        job_id = (await submit(client, f"r-{number}", f"d-{number}")).job.job_id
        claimed, job = await asyncio.gather(worker.claim("w"), client.cancel(job_id))
        if job.state is JobState.CANCELLED:
            assert claimed is None
        else:
            assert claimed is not None
            assert await worker.heartbeat(claimed.token) is HeartbeatAnswer.CANCEL
            await worker.finish(claimed.token, CANCELLED)
    assert (await client.count())[JobState.CANCELLED] == 20

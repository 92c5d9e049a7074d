"""Handing jobs to workers: leases, fencing, redelivery."""

from __future__ import annotations

import asyncio

import pytest

from shared.errors import JobStateConflict
from shared.ids import JobId
from shared.jobs.job import FencingToken, HeartbeatAnswer, JobState
from shared.jobs.queue import JobQueue, QueuePolicy
from tests.support.job_queues import ERROR, FAILED, SUCCEEDED, Backend, ManualClock, claim, history, submit, succeed

LEASE_S = QueuePolicy().lease_s
RETRY_S = QueuePolicy().retry_delay_s


async def lapse(queue: JobQueue, clock: ManualClock) -> None:
    """The lease of whoever has the job runs out, and the retry becomes due."""
    clock.advance(LEASE_S + 0.001)
    await queue.reclaim()
    clock.advance(QueuePolicy().max_retry_delay_s)


async def test_jobs_are_handed_out_oldest_first_to_one_worker_each(backend: Backend) -> None:
    one, other = await backend.open(), await backend.open()
    ids = [(await submit(one, f"r-{n}", f"d-{n}")).job.job_id for n in range(3)]
    claims = [await claim(one, "a"), await claim(other, "b"), await claim(one, "a")]
    assert [claimed.job.job_id for claimed in claims] == ids
    assert await other.claim("b") is None
    job = await one.get(ids[1])
    assert (job.state, job.worker, job.attempt, job.lease_expires_s) == (JobState.RUNNING, "b", 1, backend.clock.now + LEASE_S)


async def test_simultaneous_workers_never_share_a_job(backend: Backend) -> None:
    queues = [await backend.open() for _ in range(4)]
    for number in range(20):
        await submit(queues[0], f"r-{number}", f"d-{number}")
    claims = await asyncio.gather(*(queues[n % 4].claim(f"w-{n}") for n in range(30)))
    ids = [claimed.job.job_id for claimed in claims if claimed]
    assert len(ids) == len(set(ids)) == 20


async def test_a_waiting_worker_gets_a_job_submitted_elsewhere(backend: Backend) -> None:
    worker, client = await backend.open(), await backend.open()
    waiting = asyncio.create_task(worker.claim("w", wait_s=30.0))
    await asyncio.sleep(0.05)
    submission = await submit(client)
    claimed = await waiting
    assert claimed is not None
    assert claimed.job.job_id == submission.job.job_id


async def test_a_waiting_worker_gets_a_retry_when_it_becomes_due(backend: Backend) -> None:
    queue = await backend.open()
    await submit(queue)
    await queue.fail_attempt((await claim(queue)).token, ERROR)
    waiting = asyncio.create_task(queue.claim("w", wait_s=30.0))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    backend.clock.advance(RETRY_S)
    claimed = await waiting
    assert claimed is not None
    assert claimed.job.attempt == 2


async def test_heartbeats_keep_a_long_build_its_worker(queue: JobQueue, clock: ManualClock) -> None:
    """BR-127: a build longer than the lease is one build, as long as its worker says it lives."""
    await submit(queue)
    claimed = await claim(queue, "a")
    for _ in range(40):
        clock.advance(LEASE_S * 0.9)
        assert await queue.heartbeat(claimed.token) is HeartbeatAnswer.CONTINUE
        await queue.reclaim()
        assert await queue.claim("b") is None
    assert (await succeed(queue, claimed)).attempt == 1


async def test_only_the_newest_claim_can_change_the_job(queue: JobQueue, clock: ManualClock) -> None:
    """BR-127: a stolen job is the thief's; the loser cannot report, publish, finish, fail or give it back."""
    job_id = (await submit(queue)).job.job_id
    old = (await claim(queue, "a")).token
    await lapse(queue, clock)
    new = await claim(queue, "b")
    assert new.token.fence > old.fence
    before = await queue.get(job_id)
    assert await queue.heartbeat(old) is HeartbeatAnswer.LOST
    for act in (
        queue.begin_publish(old),
        queue.finish(old, SUCCEEDED),
        queue.finish(old, FAILED),
        queue.fail_attempt(old, ERROR),
        queue.release(old),
        queue.record_event(old, stage="build"),
    ):
        with pytest.raises(JobStateConflict):
            await act
    assert await queue.get(job_id) == before
    assert (await succeed(queue, new)).state is JobState.SUCCEEDED
    with pytest.raises(JobStateConflict):
        await queue.finish(old, SUCCEEDED)


async def test_a_loser_in_the_middle_of_publishing_is_fenced_off_too(queue: JobQueue, clock: ManualClock) -> None:
    await submit(queue)
    old = (await claim(queue, "a")).token
    await queue.begin_publish(old)
    await lapse(queue, clock)
    new = await claim(queue, "b")
    with pytest.raises(JobStateConflict):
        await queue.finish(old, SUCCEEDED)
    assert (await succeed(queue, new)).worker == "b"


async def test_a_late_worker_nobody_replaced_keeps_its_job(queue: JobQueue, clock: ManualClock) -> None:
    """The lease ran out but no pass has seen it: the claim is still the newest one."""
    await submit(queue)
    claimed = await claim(queue)
    clock.advance(LEASE_S * 3)
    assert await queue.heartbeat(claimed.token) is HeartbeatAnswer.CONTINUE
    assert (await queue.reclaim()).lapsed == 0
    assert (await succeed(queue, claimed)).state is JobState.SUCCEEDED


async def test_a_dead_worker_costs_its_lease_not_the_job_limit(queue: JobQueue, clock: ManualClock) -> None:
    """BR-132: redelivery waits for the lease, whatever the longest timeout of any job."""
    await submit(queue, max_runtime_s=3600)
    await claim(queue, "a")
    clock.advance(LEASE_S - 1)
    assert (await queue.reclaim()).lapsed == 0
    clock.advance(2)
    assert (await queue.reclaim()).lapsed == 1
    assert await queue.claim("b") is None, "the retry waits its delay"
    clock.advance(RETRY_S)
    assert (await claim(queue, "b")).job.attempt == 2


async def test_a_job_that_kills_its_workers_is_given_up_with_evidence(queue: JobQueue, clock: ManualClock) -> None:
    """BR-137: redelivery caused by death counts, and what is known of the deaths is kept."""
    job_id = (await submit(queue, max_attempts=3)).job.job_id
    for attempt in (1, 2, 3):
        claimed = await claim(queue, f"w-{attempt}")
        assert claimed.job.attempt == attempt
        await queue.record_event(claimed.token, stage="build")
        await lapse(queue, clock)
    assert await queue.claim("w-4") is None
    job = await queue.get(job_id)
    assert (job.state, job.attempt) == (JobState.DEAD_LETTERED, 3)
    assert job.error is not None
    assert job.error.details == {"cause": "WORKER_LOST", "worker": "w-3", "stage": "build"}
    assert [e.message for e in await history(queue, job_id) if "w-2 stopped" in e.message]
    assert (await queue.list(states=[JobState.DEAD_LETTERED])).jobs == (job,)


async def test_reclaim_says_what_it_moved(queue: JobQueue, clock: ManualClock) -> None:
    await submit(queue, "r-1", "d-1", max_attempts=1)
    await submit(queue, "r-2", "d-2")
    await claim(queue)
    await claim(queue)
    clock.advance(LEASE_S + 1)
    report = await queue.reclaim()
    assert (report.lapsed, report.dead_lettered, report.expired, report.forgotten) == (2, 1, 0, 0)
    assert (await queue.reclaim()).lapsed == 0


async def test_jobs_of_a_dead_worker_go_to_one_with_another_name(queue: JobQueue, clock: ManualClock) -> None:
    """BR-128: ten jobs taken, dead at the third: all ten finish, under a new name."""
    for number in range(10):
        await submit(queue, f"r-{number}", f"d-{number}")
    taken = [await claim(queue, "old") for _ in range(10)]
    for claimed in taken[:2]:
        await succeed(queue, claimed)
    await lapse(queue, clock)
    while (claimed := await queue.claim("new")) is not None:
        await succeed(queue, claimed)
    assert (await queue.count())[JobState.SUCCEEDED] == 10


async def test_an_orphan_is_found_while_its_process_lives(queue: JobQueue, clock: ManualClock) -> None:
    """BR-138: no restart needed; what is being worked on is not stolen; the attempt count is kept."""
    orphan = (await submit(queue, "r-1", "d-1")).job.job_id
    await submit(queue, "r-2", "d-2")
    await claim(queue, "a")
    working = await claim(queue, "a")
    clock.advance(LEASE_S * 0.9)
    await queue.heartbeat(working.token)
    clock.advance(LEASE_S * 0.2)
    await queue.reclaim()
    clock.advance(RETRY_S)
    again = await claim(queue, "b")
    assert (again.job.job_id, again.job.attempt) == (orphan, 2)
    assert await queue.claim("b") is None
    assert (await succeed(queue, working)).attempt == 1


async def test_simultaneous_passes_count_a_lapsed_lease_once(backend: Backend) -> None:
    queues = [await backend.open() for _ in range(3)]
    await submit(queues[0])
    await claim(queues[0])
    backend.clock.advance(LEASE_S + 1)
    reports = await asyncio.gather(*(queue.reclaim() for queue in queues * 3))
    assert sum(report.lapsed for report in reports) == 1


async def test_a_token_of_an_unknown_job_is_lost(queue: JobQueue) -> None:
    assert await queue.heartbeat(FencingToken(JobId("no-such-job"), 1)) is HeartbeatAnswer.LOST

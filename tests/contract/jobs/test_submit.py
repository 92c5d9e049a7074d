"""Accepting jobs: idempotent by request, single flight by spec, bounded."""

from __future__ import annotations

import asyncio

import pytest

from shared.errors import DuplicateRequest, FieldOutOfRange, QueueFull
from shared.jobs.job import JobLimits, JobState, Outcome
from shared.jobs.queue import JobQueue, QueuePolicy
from tests.support.job_queues import ARTIFACT, CANCELLED, FAILED, SUCCEEDED, Backend, ManualClock, claim, submit, succeed


async def test_an_accepted_job_waits_with_everything_it_was_given(queue: JobQueue, clock: ManualClock) -> None:
    spec = '{"name":"é"}'.encode()
    limits = JobLimits(max_runtime_s=5, max_pending_s=6, max_host_bytes=7, max_attempts=2)
    submission = await queue.submit(request_id="r-1", spec=spec, spec_digest="d-1", limits=limits)
    assert submission.created
    job = await queue.get(submission.job.job_id)
    assert job == submission.job
    assert (job.request_id, job.spec, job.spec_digest, job.limits) == ("r-1", spec, "d-1", limits)
    assert (job.state, job.attempt, job.created_s, job.started_s, job.finished_s) == (JobState.QUEUED, 0, clock.now, None, None)


async def test_the_same_request_gets_the_same_job_whatever_became_of_it(queue: JobQueue) -> None:
    first = await submit(queue, "r")
    assert (await submit(queue, "r")).job == first.job
    claimed = await claim(queue)
    assert (await submit(queue, "r")).job.state is JobState.RUNNING
    await queue.finish(claimed.token, FAILED)
    again = await submit(queue, "r")
    assert (again.created, again.job.job_id, again.job.state) == (False, first.job.job_id, JobState.FAILED)


async def test_a_request_id_cannot_be_used_for_another_spec(queue: JobQueue) -> None:
    await submit(queue, "r", "digest-a")
    with pytest.raises(DuplicateRequest):
        await submit(queue, "r", "digest-b")
    assert (await queue.count())[JobState.QUEUED] == 1


async def test_a_request_is_the_same_whoever_builds_it(queue: JobQueue) -> None:
    """Asked again after an upgrade, or by another kind of host: the digest of the build is another, the request is not."""
    first = await submit(queue, "r", "digest-a")
    again = await queue.submit(request_id="r", spec=first.job.spec, spec_digest="digest-b", limits=JobLimits())
    assert (again.created, again.job) == (False, first.job)


async def test_equal_specs_share_a_job_that_waits_runs_or_succeeded(queue: JobQueue) -> None:
    first = await submit(queue, "r-1")
    assert not (await submit(queue, "r-2")).created
    claimed = await claim(queue)
    assert (await submit(queue, "r-3")).job.job_id == first.job.job_id
    await succeed(queue, claimed)
    shared = await submit(queue, "r-4")
    assert (shared.created, shared.job.job_id, shared.job.artifact_id) == (False, first.job.job_id, ARTIFACT)


@pytest.mark.parametrize("ending", [FAILED, CANCELLED, Outcome(JobState.TIMED_OUT, error=FAILED.error)], ids=lambda o: o.state)
async def test_a_job_that_ended_badly_answers_no_new_request(queue: JobQueue, ending: Outcome) -> None:
    first = await submit(queue, "r-1")
    await queue.finish((await claim(queue)).token, ending)
    second = await submit(queue, "r-2")
    assert second.created
    assert second.job.job_id != first.job.job_id


async def test_a_job_about_to_be_cancelled_answers_no_new_request(queue: JobQueue) -> None:
    first = await submit(queue, "r-1")
    await claim(queue)
    await queue.cancel(first.job.job_id)
    assert (await submit(queue, "r-2")).created


async def test_a_succeeded_job_can_be_passed_over_when_its_artifact_is_gone(queue: JobQueue) -> None:
    first = await submit(queue, "r-1")
    await succeed(queue, await claim(queue))

    async def rebuild(request: str) -> tuple[bool, str]:
        made = await submit(queue, request, reuse_finished=False)
        return made.created, made.job.job_id

    created, second = await rebuild("r-1")
    assert created
    assert second != first.job.job_id
    assert await rebuild("r-1") == (False, second), "the request is bound to its new job"
    assert await rebuild("r-2") == (False, second), "a rebuild under way is shared"
    assert (await submit(queue, "r-1")).job.job_id == second
    assert (await submit(queue, "r-3")).job.job_id == second


async def test_a_request_keeps_its_job_when_a_newer_one_of_its_spec_exists(queue: JobQueue) -> None:
    old = (await submit(queue, "r-1")).job.job_id
    await succeed(queue, await claim(queue))
    await submit(queue, "r-2", reuse_finished=False)
    assert (await submit(queue, "r-1")).job.job_id == old
    assert (await submit(queue, "r-3")).job.job_id != old, "a new request joins the newest"


async def test_a_new_run_of_a_finished_spec_starts_fresh(queue: JobQueue, clock: ManualClock) -> None:
    """BR-135: a re-used key must not inherit the earlier run's times and attempts."""
    await submit(queue, "r-1")
    await queue.finish((await claim(queue)).token, FAILED)
    clock.advance(10_000)
    job = (await submit(queue, "r-2")).job
    assert (job.attempt, job.created_s, job.started_s, job.finished_s, job.error) == (0, clock.now, None, None, None)
    clock.advance(5)
    claimed = await claim(queue)
    assert (claimed.job.job_id, claimed.job.attempt, claimed.job.started_s) == (job.job_id, 1, clock.now)
    assert await queue.heartbeat(claimed.token) == "continue"


async def test_many_simultaneous_requests_for_one_spec_build_once(backend: Backend) -> None:
    queues = [await backend.open() for _ in range(3)]
    made = await asyncio.gather(*(submit(queues[i % 3], f"r-{i}") for i in range(60)))
    assert sum(submission.created for submission in made) == 1
    assert len({submission.job.job_id for submission in made}) == 1


async def test_many_simultaneous_repeats_of_one_request_make_one_job(backend: Backend) -> None:
    queues = [await backend.open() for _ in range(3)]
    made = await asyncio.gather(*(submit(queues[i % 3], "r") for i in range(30)))
    assert sum(submission.created for submission in made) == 1


async def test_a_full_queue_refuses_new_jobs_but_answers_known_requests(backend: Backend) -> None:
    queue = await backend.open(QueuePolicy(max_queued=2))
    for number in range(2):
        await submit(queue, f"r-{number}", f"d-{number}")
    with pytest.raises(QueueFull):
        await submit(queue, "r-2", "d-2")
    assert not (await submit(queue, "r-0", "d-0")).created
    assert not (await submit(queue, "r-3", "d-1")).created
    await claim(queue)
    assert (await submit(queue, "r-2", "d-2")).created, "a running job does not wait"


@pytest.mark.parametrize(
    ("request_id", "digest", "spec"),
    [("", "d", b"{}"), ("a b", "d", b"{}"), ("x" * 129, "d", b"{}"), ("r", "", b"{}"), ("r", "../d", b"{}"), ("r", "d", b"\xff")],
)
async def test_malformed_submissions_are_refused(queue: JobQueue, request_id: str, digest: str, spec: bytes) -> None:
    with pytest.raises(FieldOutOfRange):
        await queue.submit(request_id=request_id, spec=spec, spec_digest=digest, limits=JobLimits())
    assert (await queue.count())[JobState.QUEUED] == 0


async def test_finishing_needs_no_publication_when_nothing_was_built(queue: JobQueue) -> None:
    """A worker that finds the artifact in the store ends the job from RUNNING, and says so."""
    await submit(queue)
    job = await queue.finish((await claim(queue)).token, Outcome(JobState.SUCCEEDED, artifact_id=ARTIFACT, reused=True))
    assert (job.state, job.reused, job.artifact_id) == (JobState.SUCCEEDED, True, SUCCEEDED.artifact_id)

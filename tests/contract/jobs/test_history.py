"""Watching, listing, counting and forgetting jobs."""

from __future__ import annotations

import asyncio

import pytest

from shared.errors import DuplicateRequest, FieldOutOfRange, JobNotFound
from shared.jobs.job import JobEvent, JobState
from shared.jobs.lifecycle import MAX_EVENTS
from shared.jobs.queue import JobQueue, QueuePolicy
from shared.text import MAX_CHARS
from tests.support.job_queues import CANCELLED, ERROR, Backend, ManualClock, claim, history, submit, succeed


async def eventful_job(queue: JobQueue, clock: ManualClock) -> str:
    """A job with a failed attempt, progress and a good end."""
    job_id = (await submit(queue)).job.job_id
    await queue.fail_attempt((await claim(queue, "w-1")).token, ERROR)
    clock.advance(10)
    claimed = await claim(queue, "w-2")
    for number in range(5):
        await queue.record_event(claimed.token, stage="build", fraction=number / 4, message=f"part {number}", rss_bytes=number)
    await succeed(queue, claimed)
    return str(job_id)


async def test_the_history_tells_everything_in_order(queue: JobQueue, clock: ManualClock) -> None:
    start = clock.now
    events = await history(queue, await eventful_job(queue, clock))
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    states = [event.state.value for event in events]
    assert states == ["queued", "running", "queued", "running", *["running"] * 5, "publishing", "succeeded"]
    assert events[6] == JobEvent(
        sequence=7, time_s=start + 10, state=JobState.RUNNING, stage="build", fraction=0.5, message="part 2", rss_bytes=2, attempt=2
    )


async def test_watching_resumes_anywhere_without_gap_or_repeat(queue: JobQueue, clock: ManualClock) -> None:
    job_id = await eventful_job(queue, clock)
    whole = await history(queue, job_id)
    for after in range(len(whole) + 1):
        assert await history(queue, job_id, after) == whole[after:]
    assert await history(queue, job_id, 2**64 - 1) == []


async def test_a_watcher_sees_what_another_process_records_and_ends_with_the_job(backend: Backend) -> None:
    worker, client = await backend.open(), await backend.open()
    job_id = (await submit(client)).job.job_id
    seen: list[JobEvent] = []

    async def watch() -> None:
        async for event in client.watch(job_id):
            seen.append(event)

    async def until(count: int) -> None:
        while len(seen) < count:
            await asyncio.sleep(0.01)

    watching = asyncio.create_task(watch())
    await until(1)
    claimed = await claim(worker)
    await until(2)
    await worker.record_event(claimed.token, stage="load", message="half")
    await until(3)
    assert not watching.done()
    await succeed(worker, claimed)
    await watching
    assert seen == await history(worker, job_id)
    assert seen[-1].state is JobState.SUCCEEDED


async def test_simultaneous_events_get_distinct_numbers(backend: Backend) -> None:
    queues = [await backend.open() for _ in range(3)]
    job_id = (await submit(queues[0])).job.job_id
    claimed = await claim(queues[0])
    await asyncio.gather(*(queues[n % 3].record_event(claimed.token, stage="build", message=str(n)) for n in range(30)))
    await queues[0].finish(claimed.token, CANCELLED)
    events = await history(queues[1], job_id)
    assert [event.sequence for event in events] == list(range(1, 34))
    assert sorted(int(event.message) for event in events[2:-1]) == list(range(30))


async def test_watching_an_unknown_job_says_so(queue: JobQueue) -> None:
    with pytest.raises(JobNotFound):
        await history(queue, "no-such-job")


async def test_an_endless_history_is_cut_but_its_end_is_kept(queue: JobQueue) -> None:
    job_id = (await submit(queue)).job.job_id
    claimed = await claim(queue)
    for _ in range(MAX_EVENTS + 5):
        await queue.record_event(claimed.token, stage="build", message="x" * 5000)
    await succeed(queue, claimed)
    events = await history(queue, job_id)
    assert [event.sequence for event in events] == list(range(1, MAX_EVENTS + 3))
    assert events[-1].state is JobState.SUCCEEDED
    assert max(len(event.message) for event in events) == MAX_CHARS


async def test_text_that_is_no_text_is_stored_as_text(queue: JobQueue) -> None:
    """A tool's output may hold anything; the history stays valid UTF-8 (BR-161)."""
    job_id = (await submit(queue)).job.job_id
    claimed = await claim(queue)
    await queue.record_event(claimed.token, stage="b\udcff", message="\ud800 \x00 é", fraction=7.0)
    await succeed(queue, claimed)
    event = (await history(queue, job_id))[2]
    assert (event.stage, event.message, event.fraction) == ("b?", "? \x00 é", 1.0)


async def test_pages_cover_all_jobs_once_newest_first(queue: JobQueue) -> None:
    ids = [(await submit(queue, f"r-{n}", f"d-{n}")).job.job_id for n in range(7)]
    seen, token = [], ""
    while True:
        page = await queue.list(page_size=3, page_token=token)
        assert len(page.jobs) <= 3
        seen += [job.job_id for job in page.jobs]
        token = page.next_page_token
        if not token:
            break
        if len(seen) == 3:
            await submit(queue, "late", "late")  # a job accepted meanwhile does not shift the pages
    assert seen == ids[::-1]


async def test_pages_of_exactly_the_size_end(queue: JobQueue) -> None:
    for number in range(4):
        await submit(queue, f"r-{number}", f"d-{number}")
    page = await queue.list(page_size=2)
    page = await queue.list(page_size=2, page_token=page.next_page_token)
    assert (len(page.jobs), page.next_page_token) == (2, "")


async def test_listing_and_counting_by_state(queue: JobQueue) -> None:
    for number in range(6):
        await submit(queue, f"r-{number}", f"d-{number}")
    running = [await claim(queue) for _ in range(3)]
    done = await succeed(queue, running[0])
    await queue.fail_attempt(running[1].token, ERROR)
    assert (await queue.list(states=[JobState.SUCCEEDED])).jobs == (done,)
    both = await queue.list(states=[JobState.RUNNING, JobState.SUCCEEDED], page_size=1)
    assert [job.job_id for job in both.jobs] == [running[2].job.job_id]
    assert both.next_page_token
    expected = dict.fromkeys(JobState, 0) | {JobState.QUEUED: 4, JobState.RUNNING: 1, JobState.SUCCEEDED: 1}
    assert await queue.count() == expected


@pytest.mark.parametrize(("size", "token"), [(0, ""), (501, ""), (-1, ""), (1, "x"), (1, "-1"), (1, "9" * 19), (1, "1.0")])
async def test_absurd_pages_are_refused(queue: JobQueue, size: int, token: str) -> None:
    with pytest.raises(FieldOutOfRange):
        await queue.list(page_size=size, page_token=token)


async def test_old_jobs_are_forgotten_whole(backend: Backend) -> None:
    queue = await backend.open(QueuePolicy(retention_s=100))
    old = await eventful_job(queue, backend.clock)
    await submit(queue, "request-2", "digest")
    waiting = (await submit(queue, "r-3", "d-3")).job.job_id
    backend.clock.advance(101)
    report = await queue.reclaim()
    assert (report.forgotten, report.lapsed, report.expired) == (1, 0, 0)
    with pytest.raises(JobNotFound):
        await queue.get(old)
    with pytest.raises(JobNotFound):
        await history(queue, old)
    assert [job.job_id for job in (await queue.list()).jobs] == [waiting]
    assert (await queue.count())[JobState.SUCCEEDED] == 0
    for request in ("request", "request-2"):
        assert (await submit(queue, request, f"other-{request}")).created, "its request ids are free again"
    assert (await submit(queue, "r-4", "digest")).created, "its digest answers nobody"


async def test_simultaneous_passes_forget_a_job_once(backend: Backend) -> None:
    queues = [await backend.open(QueuePolicy(retention_s=100)) for _ in range(3)]
    await submit(queues[0])
    await succeed(queues[0], await claim(queues[0]))
    backend.clock.advance(101)
    reports = await asyncio.gather(*(queue.reclaim() for queue in queues * 3))
    assert sum(report.forgotten for report in reports) == 1
    assert await queues[0].count() == dict.fromkeys(JobState, 0)


async def test_forgetting_a_job_leaves_a_request_that_went_over_to_a_newer_one(backend: Backend) -> None:
    queue = await backend.open(QueuePolicy(retention_s=100))
    old = (await submit(queue, "r")).job.job_id
    await succeed(queue, await claim(queue))
    backend.clock.advance(60)
    rebuilt = await submit(queue, "r", reuse_finished=False)
    backend.clock.advance(60)
    assert (await queue.reclaim()).forgotten == 1
    with pytest.raises(JobNotFound):
        await queue.get(old)
    with pytest.raises(DuplicateRequest):
        await submit(queue, "r", "other")
    again = await submit(queue, "r")
    assert (again.created, again.job.job_id) == (False, rebuilt.job.job_id)

"""Real processes that die, hang and compete."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from shared.jobs.job import Claim, JobState
from shared.jobs.queue import JobQueue
from tests.support.job_queues import Backend, history, submit, succeed
from tests.support.queue_process import FAST

Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def spawn(backend: Backend) -> Iterator[Spawn]:
    """Start a process on the backend in a role of tests/support/queue_process.py; it ends with the test."""
    started: list[subprocess.Popen[str]] = []

    def start(role: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.support.queue_process", backend.location, role]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


async def claim_after_reclaim(queue: JobQueue) -> Claim:
    """Keep house until the lease of the present owner has lapsed and the job may be claimed."""
    while True:
        await queue.reclaim()
        claimed = await queue.claim("survivor", wait_s=0.1)
        if claimed is not None:
            return claimed


async def test_the_job_of_a_killed_process_is_finished_by_another(backend: Backend, spawn: Spawn) -> None:
    queue = await backend.open(FAST, real_time=True)
    job_id = (await submit(queue)).job.job_id
    worker = spawn("hold")
    assert read_line(worker) == job_id
    assert await queue.claim("survivor") is None
    worker.kill()
    claimed = await claim_after_reclaim(queue)
    assert (claimed.job.job_id, claimed.job.attempt) == (job_id, 2)
    assert (await succeed(queue, claimed)).state is JobState.SUCCEEDED


async def test_a_suspended_process_that_wakes_up_cannot_finish_the_job_again(backend: Backend, spawn: Spawn) -> None:
    """BR-127: SIGSTOP, the job is stolen and done, SIGCONT: the loser's result is dropped."""
    queue = await backend.open(FAST, real_time=True)
    job_id = (await submit(queue)).job.job_id
    worker = spawn("hold")
    read_line(worker)
    os.kill(worker.pid, signal.SIGSTOP)
    done = await succeed(queue, await claim_after_reclaim(queue))
    os.kill(worker.pid, signal.SIGCONT)
    assert worker.stdin is not None
    print(file=worker.stdin, flush=True)
    assert await asyncio.to_thread(read_line, worker) == "conflict"
    assert await queue.get(job_id) == done
    assert [event.state for event in await history(queue, job_id)].count(JobState.SUCCEEDED) == 1


async def test_two_replicas_build_each_of_a_hundred_jobs_half_of_them_duplicates_once(backend: Backend, spawn: Spawn) -> None:
    queue = await backend.open(FAST, real_time=True)
    workers = [spawn("drain"), spawn("drain")]
    ids = [(await submit(queue, f"r-{n}", f"d-{n // 2}")).job.job_id for n in range(100)]
    assert len(set(ids)) == 50
    outputs = await asyncio.gather(*(asyncio.to_thread(worker.communicate) for worker in workers))
    done = [line for output, _ in outputs for line in output.split()]
    while (claimed := await queue.claim("rest")) is not None:  # should both have come too early
        await succeed(queue, claimed)
        done.append(claimed.job.job_id)
    assert sorted(done) == sorted(set(ids))
    assert (await queue.count())[JobState.SUCCEEDED] == 50
    assert {job.attempt for job in (await queue.list(page_size=100)).jobs} == {1}


async def test_what_was_acknowledged_survives_the_death_of_the_process_that_wrote_it(backend: Backend, spawn: Spawn) -> None:
    writers = [spawn("submit"), spawn("submit")]
    acknowledged = [await asyncio.to_thread(read_line, writer) for _ in range(20) for writer in writers]
    for writer in writers:
        writer.kill()
        assert writer.stdout is not None
        acknowledged += [line.strip() for line in writer.stdout if line.endswith("\n")]
    queue = await backend.open(FAST, real_time=True)
    for job_id in acknowledged:
        job = await queue.get(job_id)
        assert job.state is JobState.QUEUED
        assert job.last_sequence == 1
    waiting = (await queue.count())[JobState.QUEUED]
    assert len(acknowledged) <= waiting <= len(acknowledged) + 2, "at most the one each process was about to hear of"
    claimed = {claimed.job.job_id for _ in range(waiting) if (claimed := await queue.claim("w")) is not None}
    assert claimed >= set(acknowledged)

"""Whatever a build process does, its job ends as it should and the worker goes on."""

import asyncio
import errno
import itertools
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from compiler_service.worker import build_process
from compiler_service.worker import worker as worker_module
from compiler_service.worker.process_tree import process_tree, read_stat
from shared.cgroup import ContainerMemory
from shared.jobs.job import JobLimits, JobState

REPORT = [["fetch", 0.0, "source"], ["load", 0.5, "weights"], ["load", 1.0, "weights"]]


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def pid_in(path: Path) -> int:
    return int(path.read_text()) if path.exists() and path.read_text() else 0


async def running_build(bench, tmp_path, **plan):
    """(job, pids of the build and its two children), all running."""
    files = [tmp_path / name for name in ("build.pid", "child0.pid", "child1.pid")]
    job = await bench.submit(end="hang", pid=str(files[0]), children=[str(file) for file in files[1:]], **plan)
    bench.start_worker()
    pids = await bench.until(lambda: all(map(pid_in, files)) and [pid_in(file) for file in files])
    assert all(map(is_running, pids))
    return job, pids


async def test_a_build_ends_with_its_artifact_and_its_history(bench, tmp_path):
    bench.start_worker()
    job, events = await bench.end_of(
        await bench.submit(report=REPORT, ask=True, published=str(tmp_path / "published"), artifact_id="b" * 64, end="built")
    )
    assert (job.state, job.artifact_id, job.reused, job.attempt) == (JobState.SUCCEEDED, "b" * 64, False, 1)
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    stages = [(event.stage, event.fraction, event.message) for event in events if event.message in ("source", "weights")]
    assert stages == [tuple(line) for line in REPORT]
    states = [event.state for event in events]
    assert states.index(JobState.PUBLISHING) > max(i for i, event in enumerate(events) if event.message == "weights")
    assert max(event.rss_bytes for event in events) > 1 << 20
    assert (tmp_path / "published").exists()
    assert not list((tmp_path / "builds").iterdir())


async def test_reuse_is_told(bench):
    bench.start_worker()
    job, _ = await bench.end_of(await bench.submit(end="built", reused=True))
    assert (job.state, job.reused) == (JobState.SUCCEEDED, True)


async def test_a_refusal_of_the_input_ends_the_job_at_once(bench, tmp_path):
    bench.start_worker()
    job, _ = await bench.end_of(await bench.submit(end="failed"))
    assert (job.state, job.attempt) == (JobState.FAILED, 1)
    assert (job.error.reason, job.error.message, job.error.details) == ("SOURCE_INVALID", "shard 2 is missing", {"shard": "2"})
    assert len(list((tmp_path / "builds").glob("*.log"))) == 1


@pytest.mark.parametrize("end", ["retryable", "crash", "exit", "silence", "garbage"])
async def test_what_may_go_away_is_tried_again_to_the_limit(bench, end):
    """BR-137: an attempt ended by death counts, and the evidence stays."""
    bench.start_worker()
    job, events = await bench.end_of(await bench.submit(end=end, report=REPORT[:1], limits=JobLimits(max_attempts=2)))
    assert (job.state, job.attempt) == (JobState.DEAD_LETTERED, 2)
    assert job.error.reason == ("STORE_UNAVAILABLE" if end == "retryable" else "BUILD_FAILED")
    assert [event.attempt for event in events if event.message == "source"] == [1, 2]
    evidence = {"crash": ["SIGSEGV", "stage fetch", "about to fall over"], "exit": ["exit code 1", "RuntimeError: a bug"]}
    assert all(words in job.error.message for words in evidence.get(end, []))


async def test_a_crash_then_a_build(bench, tmp_path):
    bench.start_worker()
    job, _ = await bench.end_of(await bench.submit(counter=str(tmp_path / "n"), crash_until=2, end="built"))
    assert (job.state, job.attempt) == (JobState.SUCCEEDED, 3)


async def test_cancel_in_a_later_attempt_wins(bench, tmp_path):
    """BR-137."""
    bench.start_worker()
    job = await bench.submit(counter=str(tmp_path / "n"), crash_until=1, end="hang", report=REPORT[:1])

    async def second_attempt():
        return (await bench.queue.get(job.job_id)).attempt == 2

    await bench.until(second_attempt)
    await bench.queue.cancel(job.job_id)
    ended, _ = await bench.end_of(job)
    assert (ended.state, ended.attempt) == (JobState.CANCELLED, 2)


async def test_cancel_ends_the_build_and_everything_it_started(bench, tmp_path):
    job, pids = await running_build(bench, tmp_path)
    await bench.queue.cancel(job.job_id)
    ended, _ = await bench.end_of(job)
    assert ended.state is JobState.CANCELLED
    assert not any(map(is_running, pids)), "the job was seen to end while its build still ran"
    other, _ = await bench.end_of(await bench.submit(end="built"))
    assert other.state is JobState.SUCCEEDED


async def test_a_build_that_takes_too_long(bench, tmp_path):
    job, pids = await running_build(bench, tmp_path, limits=JobLimits(max_runtime_s=900.0))
    bench.queue._clock = lambda: time.time() + 1000.0
    ended, _ = await bench.end_of(job)
    assert (ended.state, ended.error.reason) == (JobState.TIMED_OUT, "RUN_TIMEOUT")
    assert "900 s (limits.max_runtime_s)" in ended.error.message
    assert not any(map(is_running, pids))


async def test_a_publication_that_hangs_ends_with_the_attempts_time(bench, tmp_path):
    job = await bench.submit(
        ask=True,
        published=str(tmp_path / "published"),
        end="hang",
        pid=str(tmp_path / "pid"),
        limits=JobLimits(max_runtime_s=900.0),
    )
    bench.start_worker()
    await bench.until((tmp_path / "published").exists)
    assert (await bench.queue.get(job.job_id)).state is JobState.PUBLISHING
    bench.queue._clock = lambda: time.time() + 1000.0
    ended, _ = await bench.end_of(job)
    assert (ended.state, ended.error.reason, ended.artifact_id) == (JobState.TIMED_OUT, "RUN_TIMEOUT", "")
    assert not is_running(pid_in(tmp_path / "pid"))


async def test_a_build_that_holds_too_much_memory(bench, tmp_path):
    limit = 300 << 20
    job, pids = await running_build(bench, tmp_path, limits=JobLimits(max_host_bytes=limit), megabytes=400)
    ended, _ = await bench.end_of(job)
    assert (ended.state, ended.attempt, ended.error.reason) == (JobState.FAILED, 1, "MEMORY_EXHAUSTED")
    assert f"more than {limit} (limits.max_host_bytes)" in ended.error.message
    assert not any(map(is_running, pids))


async def test_a_build_that_fills_the_container_ends_before_the_kernel_ends_the_service(bench, tmp_path, monkeypatch):
    job, pids = await running_build(bench, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(worker_module, "container_memory", lambda: ContainerMemory(limit_bytes=1600, left_bytes=99))
        ended, _ = await bench.end_of(job)
    assert (ended.state, ended.error.reason) == (JobState.FAILED, "MEMORY_EXHAUSTED")
    assert "container has 1600 bytes" in ended.error.message
    assert not any(map(is_running, pids))
    other, _ = await bench.end_of(await bench.submit(end="built"))
    assert other.state is JobState.SUCCEEDED


async def test_a_cancel_before_publication_refuses_it(bench, tmp_path):
    """The cancel arrives while the build asks; it is then never allowed, however late the heartbeat."""
    job = await bench.submit(
        counter=str(tmp_path / "n"), crash_until=0, ask=True, published=str(tmp_path / "published"), end="built"
    )
    begin = bench.queue.begin_publish

    async def cancel_first(token):
        await bench.queue.cancel(job.job_id)
        await begin(token)

    bench.queue.begin_publish = cancel_first
    bench.start_worker()
    ended, _ = await bench.end_of(job)
    assert (ended.state, ended.artifact_id) == (JobState.CANCELLED, "")
    assert not (tmp_path / "published").exists()


async def test_a_claim_that_is_lost_ends_the_build_and_reports_nothing(bench, tmp_path):
    """BR-127: of two workers that believe they have the job, only the newer one speaks for it."""
    job, pids = await running_build(bench, tmp_path, limits=JobLimits(max_runtime_s=7 * 86400.0))
    jumps = itertools.count(1)

    async def lapse():
        """The queue's time jumps past the lease, as it does for a worker that was stopped; a heartbeat may come between."""
        ahead = 1e4 * next(jumps)
        bench.queue._clock = lambda: time.time() + ahead
        return (await bench.queue.reclaim()).lapsed

    assert await bench.until(lapse) == 1
    taken = await bench.until(lambda: bench.queue.claim("another"))
    await bench.until(lambda: not any(map(is_running, pids)))
    await bench.stop()
    now = await bench.queue.get(job.job_id)
    assert (now.state, now.worker, now.fence) == (JobState.RUNNING, "another", taken.job.fence)


@pytest.mark.parametrize("verb", ["record_event", "begin_publish", "finish", "fail_attempt", "heartbeat"])
async def test_a_queue_that_loses_a_running_job_loses_no_worker(bench, tmp_path, verb):
    """A Redis that was flushed: the job is gone whatever the worker has to say of it."""
    asked = getattr(bench.queue, verb)

    async def forget_first(token, *arguments, **fields):
        while not await bench.queue._forget(await bench.queue.get(token.job_id)):
            await asyncio.sleep(0)
        setattr(bench.queue, verb, asked)
        return await asked(token, *arguments, **fields)

    setattr(bench.queue, verb, forget_first)
    end = {"fail_attempt": "crash", "heartbeat": "hang"}.get(verb, "built")
    job = await bench.submit(report=REPORT, ask=True, published=str(tmp_path / "published"), end=end)
    bench.start_worker()

    async def is_forgotten():
        return job.job_id not in {known.job_id for known in (await bench.queue.list()).jobs}

    await bench.until(is_forgotten)
    other, _ = await bench.end_of(await bench.submit(end="built"))
    assert other.state is JobState.SUCCEEDED


async def test_a_worker_that_stops_gives_its_job_back(bench, tmp_path):
    job, pids = await running_build(bench, tmp_path)
    await bench.stop()
    returned = await bench.queue.get(job.job_id)
    assert (returned.state, returned.attempt) == (JobState.QUEUED, 0)
    assert not any(map(is_running, pids))


async def test_jobs_after_a_crash_run_in_order(bench):
    bench.start_worker()
    jobs = [await bench.submit(end=end, limits=JobLimits(max_attempts=1)) for end in ("crash", "built", "garbage", "built")]
    ends = [(await bench.end_of(job))[0].state for job in jobs]
    assert ends == [JobState.DEAD_LETTERED, JobState.SUCCEEDED, JobState.DEAD_LETTERED, JobState.SUCCEEDED]


async def test_a_process_that_cannot_be_started_is_a_failed_attempt(bench):
    worker = bench.start_worker()
    worker._launcher = type(worker._launcher)(bench.directory / "builds", ("/nonexistent/python",))
    job, _ = await bench.end_of(await bench.submit(end="built", limits=JobLimits(max_attempts=1)))
    assert job.state is JobState.DEAD_LETTERED
    assert "no build process could be started" in job.error.message


async def test_what_other_builds_take_away_meanwhile_is_in_nobodys_way(bench):
    """Their logs and scratch vanish between being listed and being looked at."""
    directory = bench.directory / "builds"
    directory.mkdir()
    for name in ("gone.log", "gone.tmp"):
        (directory / name).symlink_to("nowhere")
    bench.start_worker()
    job, _ = await bench.end_of(await bench.submit(end="built"))
    assert (job.state, job.attempt) == (JobState.SUCCEEDED, 1)
    (directory / "gone.tmp").unlink()


def own_processes():
    """Of this process's tree, what other tests have started included."""
    return {stat.pid for stat in process_tree(read_stat(os.getpid())) if not stat.is_dead}


async def test_a_service_out_of_descriptors_leaves_no_process_behind(bench, monkeypatch):
    before = own_processes()

    def fail(_):
        monkeypatch.setattr(build_process, "read_stat", read_stat)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(build_process, "read_stat", fail)
    bench.start_worker()
    job, events = await bench.end_of(await bench.submit(end="built"))
    assert (job.state, job.attempt) == (JobState.SUCCEEDED, 2)
    assert any("Too many open files" in event.message for event in events)
    assert own_processes() <= before


async def test_a_build_outlives_no_service(tmp_path):
    """kill -9 of the service: the pipe closes, and the build ends itself with its group."""
    service = Path(__file__).with_name("orphaning_service.py")
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(service), str(tmp_path), stdout=asyncio.subprocess.PIPE, cwd=Path.cwd()
    )
    pids = [int(text) for text in (await process.stdout.readline()).split()]
    assert all(map(is_running, pids))
    process.send_signal(signal.SIGKILL)
    await process.wait()
    async with asyncio.timeout(30):
        while any(map(is_running, pids)):
            await asyncio.sleep(0.02)

"""What only a file can do wrong."""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path

import pytest

from shared.errors import BackendUnavailable, StoreUnavailable
from shared.jobs.job import HeartbeatAnswer, JobState
from shared.jobs.locate import open_queue
from shared.jobs.queue import QueuePolicy, ReclaimReport
from shared.jobs.sqlite import SQLiteQueue
from tests.support.job_queues import ManualClock, claim, submit, succeed


async def test_a_file_survives_its_queue(tmp_path: Path) -> None:
    queue = await open_queue(str(tmp_path / "queue.db"))
    assert isinstance(queue, SQLiteQueue)
    job_id = (await submit(queue)).job.job_id
    await queue.close()
    again = await open_queue(str(tmp_path / "queue.db"))
    assert (await succeed(again, await claim(again))).job_id == job_id
    await again.close()


async def test_what_is_no_queue_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"no database at all, but long enough to have a header" * 20)
    with sqlite3.connect(tmp_path / "newer") as db:
        db.execute("PRAGMA user_version = 99")
    for name in ("text", "newer", "no/such/folder"):
        with pytest.raises(StoreUnavailable):
            await open_queue(str(tmp_path / name))


async def test_an_acknowledged_change_is_on_the_disk(tmp_path: Path) -> None:
    """synchronous = FULL: in WAL mode NORMAL would lose acknowledged jobs with the power."""
    queue = SQLiteQueue(tmp_path / "queue.db")
    (level,) = await queue._run(lambda: queue._db.execute("PRAGMA synchronous").fetchone())
    (mode,) = await queue._run(lambda: queue._db.execute("PRAGMA journal_mode").fetchone())
    assert (level, mode) == (2, "wal")
    await queue.close()


async def test_a_change_that_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    """Record and history are one transaction."""
    queue = SQLiteQueue(tmp_path / "queue.db")
    job_id = (await submit(queue)).job.job_id
    await queue._run(
        lambda: queue._db.execute("CREATE TRIGGER full BEFORE INSERT ON events BEGIN SELECT RAISE(ABORT, 'disk full'); END")
    )
    with pytest.raises(StoreUnavailable, match="disk full"):
        await queue.claim("w")
    await queue._run(lambda: queue._db.execute("DROP TRIGGER full"))
    assert (await queue.get(job_id)).state is JobState.QUEUED
    assert (await claim(queue)).job.attempt == 1
    await queue.close()


async def test_a_forgotten_job_leaves_no_row_behind(tmp_path: Path) -> None:
    clock = ManualClock()
    queue = SQLiteQueue(tmp_path / "queue.db", QueuePolicy(), clock)
    await submit(queue)
    await succeed(queue, await claim(queue))
    clock.advance(QueuePolicy().retention_s + 1)
    await queue.reclaim()
    for table in ("jobs", "requests", "events"):
        query = f"SELECT count(*) FROM {table}"
        assert await queue._run(lambda query=query: queue._db.execute(query).fetchone()) == (0,)
    await queue.close()


async def test_a_record_nobody_can_read_does_not_stop_the_others(tmp_path: Path) -> None:
    """BR-129."""
    queue = SQLiteQueue(tmp_path / "queue.db")
    broken = (await submit(queue, "r-1", "d-1")).job.job_id
    await queue._run(lambda: queue._db.execute("UPDATE jobs SET record = '{}' WHERE job_id = ?", (broken,)))
    healthy = (await submit(queue, "r-2", "d-2")).job.job_id
    assert (await claim(queue)).job.job_id == healthy
    assert [job.job_id for job in (await queue.list()).jobs] == [healthy]
    await queue.close()


async def test_a_clock_that_is_set_back_keeps_no_job(tmp_path: Path) -> None:
    """Neither one that waits, nor one whose worker is gone; and takes none from a worker that lives."""
    clock, policy = ManualClock(), QueuePolicy()
    queue = SQLiteQueue(tmp_path / "queue.db", policy, clock)
    for name in ("orphaned", "alive", "waiting"):
        await submit(queue, name, name)
    orphaned, alive = await claim(queue, "dead"), await claim(queue, "alive")
    clock.advance(-86_400)
    assert await queue.claim("other") is None
    assert await queue.reclaim() == ReclaimReport()
    clock.advance(policy.lease_s - 1)
    assert await queue.heartbeat(alive.token) is HeartbeatAnswer.CONTINUE
    clock.advance(2)
    assert await queue.reclaim() == ReclaimReport(lapsed=1)
    assert (await queue.get(orphaned.job.job_id)).state is JobState.QUEUED
    clock.advance(policy.max_retry_delay_s)
    await queue.heartbeat(alive.token)
    ids = {(await claim(queue, "other")).job.job_id for _ in range(2)}
    assert ids == {job.job_id for job in (await queue.list()).jobs} - {alive.job.job_id}
    await queue.close()


async def test_redis_without_its_extra_is_a_typed_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shared.jobs.redis", None)
    with pytest.raises(BackendUnavailable, match=r"quire\[redis\]"):
        await open_queue("redis://127.0.0.1:1")

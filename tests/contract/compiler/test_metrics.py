"""The compiler's metrics, scraped over HTTP and compared with what its jobs came to."""

from __future__ import annotations

import asyncio

import pytest

from shared.errors import FieldOutOfRange, StoreUnavailable
from shared.jobs.job import JobLimits, JobState
from shared.jobs.queue import QueuePolicy
from shared.jobs.sqlite import SQLiteQueue
from shared.pb.quire.v1 import compiler_pb2 as pb
from shared.telemetry import metrics
from tests.contract.compiler.conftest import ENGINE_ID, refused
from tests.support.scrape import scrape

METERED = {"metrics_address": "127.0.0.1:0", "reclaim_every_s": 0.05}


async def until(client, condition):
    """A job is seen to end a moment before its attempt is counted."""
    async with asyncio.timeout(60):
        while not condition(seen := await scrape(client.compiler.metrics.address)):
            await asyncio.sleep(0.02)
    return seen


def attempts(seen):
    return {s["outcome"]: seen("quire_compiler_attempts_total", **s) for s in seen.series("quire_compiler_attempts_total")}


async def test_what_jobs_came_to_is_what_is_shown(start):
    async with start(**METERED) as client:
        report = [["fetch", 0.0, "m"], ["load", 0.5, "m"], ["load", 1.0, "m"], ["build", 0.0, "m"]]
        client.publish()
        client.source("good", report=report, end="built", artifact_id=ENGINE_ID)
        client.source("known", report=report[:1], end="built", reused=True)
        client.source("bad", end="failed")
        client.source("dying", end="crash")
        for name in ("good", "known", "bad"):
            await client.end_of((await client.create(client.spec(name))).job.job_id)
        assert not (await client.create(client.spec("good"))).created
        dead = await client.end_of((await client.create(client.spec("dying"), max_attempts=2)).job.job_id)
        assert dead.state == pb.JOB_STATE_DEAD_LETTERED
        with refused("FIELD_OUT_OF_RANGE"):
            await client.create(client.spec("good", max_len=0))
        seen = await until(client, lambda seen: seen("quire_compiler_dead_letters_total") == 1)

        assert attempts(seen) == {"succeeded": 2, "failed": 1, "queued": 1, "dead_lettered": 1}
        assert seen("quire_compiler_cache_hits_total", level="job") == 1
        assert seen("quire_compiler_cache_hits_total", level="artifact") == 1
        assert seen("quire_compiler_cache_misses_total") == 1
        assert seen("quire_compiler_lease_expiries_total") == 0
        jobs = {s["state"]: seen("quire_compiler_jobs", **s) for s in seen.series("quire_compiler_jobs")}
        assert jobs == dict.fromkeys(JobState, 0) | {"succeeded": 2, "failed": 1, "dead_lettered": 1}
        stages = {
            s["stage"]: seen("quire_compiler_stage_seconds_count", **s) for s in seen.series("quire_compiler_stage_seconds_count")
        }
        assert stages == {"fetch": 2, "load": 1, "build": 1}
        assert seen("quire_compiler_calls_total", method="CreateCompileJob", outcome="OK") == 5
        assert seen("quire_compiler_calls_total", method="CreateCompileJob", outcome="FIELD_OUT_OF_RANGE") == 1
        assert seen("quire_compiler_queue_up") == 1


async def test_waiting_and_running_jobs_show_while_they_do(start):
    async with start(**METERED) as client:
        client.source("slow", end="hang")
        client.source("next", end="built")
        running = (await client.create(client.spec("slow"))).job.job_id
        await until(client, lambda seen: seen("quire_compiler_jobs", state="running") == 1)
        await client.create(client.spec("next"))
        await until(client, lambda seen: seen("quire_compiler_jobs", state="queued") == 1)
        await client.stub.CancelCompileJob(pb.CancelCompileJobRequest(job_id=running))
        seen = await until(client, lambda seen: attempts(seen).get("succeeded") == 1)
        assert attempts(seen) == {"cancelled": 1, "succeeded": 1}


async def test_a_lease_that_lapses_is_counted_by_who_finds_it(start, tmp_path):
    """Another worker takes the job and is never heard of again."""
    async with start(**METERED, build_slots=1) as client:
        client.source("slow", end="hang")
        await client.create(client.spec("slow"))
        await until(client, lambda seen: seen("quire_compiler_jobs", state="running") == 1)
        elsewhere = SQLiteQueue(tmp_path / "data" / "jobs.sqlite", QueuePolicy(lease_s=0.05))
        await elsewhere.submit(request_id="r", spec=b"{}", spec_digest="d", limits=JobLimits(max_attempts=1))
        assert await elsewhere.claim("doomed") is not None
        seen = await until(client, lambda seen: seen("quire_compiler_lease_expiries_total") == 1)
        assert seen("quire_compiler_dead_letters_total") == 1
        await elsewhere.close()


async def test_a_queue_that_does_not_answer_is_said_and_the_rest_shown(start, monkeypatch):
    async def count(_):
        raise StoreUnavailable("gone")

    async with start(**METERED) as client:
        monkeypatch.setattr(SQLiteQueue, "count", count)
        seen = await scrape(client.compiler.metrics.address)
        assert seen("quire_compiler_queue_up") == 0
        assert seen.series("quire_compiler_jobs") == []
        assert seen("quire_compiler_dead_letters_total") == 0


async def test_metrics_do_not_leave_the_machine_by_accident(start):
    with pytest.raises(FieldOutOfRange, match="loopback"):
        async with start(metrics_address="0.0.0.0:0"):
            pass


async def test_who_connects_and_says_nothing_is_shown_out(start, monkeypatch):
    """Every connection has a thread and a descriptor."""
    monkeypatch.setattr(metrics._Handler, "timeout", 0.1)
    async with start(**METERED) as client:
        host, _, port = client.compiler.metrics.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(30):
            assert await reader.read() == b""
        writer.close()

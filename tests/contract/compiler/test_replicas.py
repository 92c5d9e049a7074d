"""Two compiler services on one Redis queue and one store."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc

from shared.pb.quire.v1 import compiler_pb2 as pb
from tests.support.compiler_replicas import channel_to, create_request, replicas, stub_of, write_source
from tests.support.redis_server import RedisServer

SPECS, SLOTS = 50, 2


async def test_of_a_hundred_jobs_half_duplicates_each_is_built_once_and_none_waits_while_a_worker_is_free(tmp_path: Path) -> None:
    """Builds stand at a gate. Whenever it has let some through, all four slots must be busy again while jobs are left."""
    server, gate, log = RedisServer(), tmp_path / "gate", tmp_path / "log"
    gate.mkdir()
    log.touch()
    write_source(tmp_path / "models", "m", gate=str(gate), publish={"size": 100, "log": str(log), "pause": 0.0})
    environment = {
        "QUIRE_COMPILER_REDIS_URL": server.url,
        "QUIRE_COMPILER_STORE": str(tmp_path / "store"),
        "QUIRE_COMPILER_BUILD_SLOTS": str(SLOTS),
    }
    with replicas(2, tmp_path / "models", environment) as services:
        channels = [channel_to(service) for service in services]
        stubs = [stub_of(channel) for channel in channels]

        async def create(number: int) -> str:
            request = create_request(f"r-{number}", "m", 256 + number // 2)
            return (await stubs[number % 2].CreateCompileJob(request, wait_for_ready=True)).job.job_id

        async def jobs(*states: pb.JobState) -> list[pb.CompileJob]:
            return list((await stubs[0].ListCompileJobs(pb.ListCompileJobsRequest(page_size=500, states=states))).jobs)

        ids = await asyncio.gather(*(create(number) for number in range(2 * SPECS)))
        assert len(set(ids)) == SPECS
        left = SPECS
        while left:
            expected = min(2 * SLOTS, left)
            while len(running := await jobs(pb.JOB_STATE_RUNNING)) != expected:  # the test's timeout bounds the wait
                assert len(running) < expected
                await asyncio.sleep(0.05)
            for job in running:
                (gate / str(job.spec.max_len)).touch()
            left -= expected
            while len(await jobs(pb.JOB_STATE_SUCCEEDED)) != SPECS - left:
                await asyncio.sleep(0.05)
        done = await jobs()
        assert {(job.state, job.attempt, job.reused) for job in done} == {(pb.JOB_STATE_SUCCEEDED, 1, False)}
        assert sorted(log.read_text().split()) == sorted({job.artifact_id for job in done})
        workers = {await worker_of(stubs[1], job.job_id) for job in done}
        assert len(workers) == 2 * SLOTS, "every slot of both services had its part"
        for channel in channels:
            await channel.close()
    server.close()


async def worker_of(stub: grpc.aio.UnaryStreamMultiCallable, job_id: str) -> str:
    """Named in the event of the claim: `attempt 1 of 3 by HOST-PID-SLOT`."""
    async for response in stub.WatchCompileJob(pb.WatchCompileJobRequest(job_id=job_id)):
        if response.event.state == pb.JOB_STATE_RUNNING:
            return response.event.message.rpartition(" ")[2]
    raise AssertionError(f"{job_id} ended without having run")

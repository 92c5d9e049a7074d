"""Explanations, health, and that the service itself stays small."""

import asyncio
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.pb.quire.v1 import compiler_pb2 as pb
from tests.contract.compiler.conftest import refused


async def explain(client, **plan):
    return await client.stub.ExplainModel(pb.ExplainModelRequest(spec=client.spec(client.source(**plan))))


async def test_an_explanation_lists_every_cache_and_stores_nothing(client):
    answer = await explain(client)
    assert answer.proved
    assert [(c.cache, c.verdict_before, c.start) for c in answer.caches] == [("k_cache.0", "proved", "write_start")]
    assert client.store.list() == ()
    assert not (await client.stub.ListCompileJobs(pb.ListCompileJobsRequest())).jobs


@pytest.mark.parametrize(
    ("end", "reason", "field"),
    [("failed", "SOURCE_INVALID", "spec.source"), ("crash", "BUILD_FAILED", ""), ("garbage", "INTERNAL", "")],
)
async def test_an_explanation_that_fails_is_the_callers_error(client, end, reason, field):
    with refused(reason, field):
        await explain(client, end=end)


async def test_an_explanation_that_no_process_can_be_started_for_says_why(client, monkeypatch):
    def full(path, *arguments, **options):
        raise OSError(errno.ENOSPC, "no space left on device")

    spec = client.spec(client.source())
    monkeypatch.setattr(Path, "mkdir", full)
    with refused("BUILD_FAILED") as caught:
        await client.stub.ExplainModel(pb.ExplainModelRequest(spec=spec))
    assert "no space left" in caught[0].message


async def test_an_explanation_takes_no_longer_than_it_may(start):
    async with start(explain_timeout_s=1.0) as client:
        with refused("RUN_TIMEOUT"):
            await explain(client, end="hang")


async def test_a_caller_that_goes_away_ends_the_explanation(client, tmp_path):
    pid_file = tmp_path / "pid"
    call = asyncio.ensure_future(explain(client, end="hang", pid=str(pid_file)))
    async with asyncio.timeout(60):
        while not pid_file.exists() or not pid_file.read_text():
            await asyncio.sleep(0.02)
        call.cancel()
        while Path(f"/proc/{pid_file.read_text()}").exists():
            await asyncio.sleep(0.02)


async def test_health_follows_the_service(start):
    async with start() as client, grpc.aio.insecure_channel(client.compiler.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "liveness", "readiness", "quire.v1.Compiler"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_worker_that_dies_of_a_bug_takes_the_service_down(client, monkeypatch):
    """Crash only: a service whose jobs nobody works on must not look alive."""

    async def broken(*_, **__):
        raise AssertionError("a bug")

    monkeypatch.setattr(client.compiler._queue, "claim", broken)
    with pytest.raises(AssertionError, match="a bug"):
        await asyncio.wait_for(client.compiler.failure(), 30)


def test_the_process_serves_until_it_is_told_to_stop(tmp_path):
    environment = {"QUIRE_DATA": str(tmp_path / "data"), "QUIRE_COMPILER_ADDRESS": "127.0.0.1:0"}
    command = [sys.executable, "-m", "compiler_service"]
    with subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert json.loads(process.stdout.readline())["address"].startswith("127.0.0.1:")
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("QUIRE_COMPILER_BUILD_SLOTS", "0"), ("QUIRE_COMPILER_ADDRESS", "0.0.0.0:0"), ("QUIRE_COMPILER_TLS_KEY", "k")],
)
def test_settings_that_cannot_be_meant(tmp_path, name, value):
    environment = {"QUIRE_DATA": str(tmp_path), "QUIRE_COMPILER_ADDRESS": "127.0.0.1:0", name: value}
    run = subprocess.run(
        [sys.executable, "-m", "compiler_service"], env=os.environ | environment, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 2
    assert run.stdout == ""
    assert "Traceback" not in run.stderr


def test_the_service_loads_no_model_libraries():
    """It watches builds that use gigabytes; what serves must not."""
    code = "import sys, compiler_service.__main__; print([m for m in ('torch', 'transformers', 'gguf') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"

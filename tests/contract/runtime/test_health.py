"""Health, reflection, and the end of the process."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sys

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from runtime_service.service import probes
from runtime_service.service.probes import probe
from runtime_service.session.load import LoadSnapshot
from shared.pb.quire.v1 import control_pb2
from tests.contract.runtime.conftest import finish_of, generate, serve, tokens_of
from tests.support.tiny_engine import Oracle

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
PROMPT = [3, 1, 4, 1, 5]


async def health(served, service):
    stub = health_pb2_grpc.HealthStub(served.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def until(served, service, status):
    while await health(served, service) != status:
        await asyncio.sleep(0.005)


@pytest.fixture(autouse=True)
def fast_polls(monkeypatch):
    monkeypatch.setattr(probes, "POLL_S", 0.005)


class FakeEngines:
    def __init__(self, is_started):
        self.is_started = is_started


class FakeLoop:
    def __init__(self, stalled_s, draining=False):
        self._stalled_s, self._draining = stalled_s, draining

    def stalled_for_s(self):
        return self._stalled_s

    def load(self):
        return LoadSnapshot((), self._draining)


@pytest.mark.parametrize(
    ("stalled_s", "draining", "started", "expected"),
    [
        (0.0, False, True, (True, True)),
        (10.0, False, True, (True, True)),
        (10.1, False, True, (False, False)),
        (math.inf, False, True, (False, False)),
        (0.0, True, True, (True, False)),
        (0.0, False, False, (True, False)),
    ],
)
def test_live_while_there_is_progress_ready_while_it_admits(stalled_s, draining, started, expected):
    """BR-165 (a dead loop), BR-166 (a hung one), BR-168 (a slow start); 0 is what an idle loop reports."""
    assert probe(FakeLoop(stalled_s, draining), FakeEngines(started), hang_after_s=10.0) == expected


async def test_a_running_server_is_live_and_ready(served):
    for service in ("", "liveness", "readiness", "quire.v1.Inference", "quire.v1.Control"):
        await until(served, service, SERVING)


async def test_a_hung_step_fails_liveness_and_its_end_restores_it(tmp_path):
    """BR-166: with requests pending and no step ending."""
    async with serve(tmp_path, hang_after_s=0.05) as served:
        await served.load()
        await until(served, "liveness", SERVING)
        served.gate.close()
        call = served.inference.Generate(generate(PROMPT))
        await call.read()
        await until(served, "liveness", NOT_SERVING)
        served.gate.open()
        await until(served, "liveness", SERVING)
        await until(served, "readiness", SERVING)


async def test_a_drained_server_is_live_and_never_ready_again(served):
    """BR-159."""
    await until(served, "readiness", SERVING)
    await served.control.Drain(control_pb2.DrainRequest(deadline=Duration(seconds=1)))
    await until(served, "readiness", NOT_SERVING)
    for _ in range(20):
        assert await health(served, "readiness") == NOT_SERVING
        await asyncio.sleep(0.005)
    assert await health(served, "liveness") == SERVING


async def test_watchers_do_not_use_up_the_server(served):
    """BR-157."""
    stub = health_pb2_grpc.HealthStub(served.channel)
    watches = [stub.Watch(health_pb2.HealthCheckRequest(service="readiness")) for _ in range(20)]
    for watch in watches:
        await watch.read()
    assert await health(served, "liveness") == SERVING
    assert len(tokens_of(await served.events(generate(PROMPT)))) == 8
    for watch in watches:
        watch.cancel()


@pytest.mark.parametrize("enabled", [True, False])
async def test_reflection_is_behind_a_flag(tmp_path, enabled):
    async with serve(tmp_path, reflection=enabled) as served:
        stub = reflection_pb2_grpc.ServerReflectionStub(served.channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        if enabled:
            names = {service.name for service in (await call.read()).list_services_response.service}
            assert {"quire.v1.Inference", "quire.v1.Control", "grpc.health.v1.Health"} <= names
        else:
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await call.read()
            assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_stopping_server_finishes_its_streams(tmp_path):
    """BR-163: the stream that is running when the signal comes ends as it would have."""
    async with serve(tmp_path, drain_s=60.0) as served:
        await served.load()
        served.gate.close()
        call = served.inference.Generate(generate(PROMPT))
        events = [await call.read()]
        stop = asyncio.create_task(served.runtime.__aexit__(None, None, None))
        await until(served, "readiness", NOT_SERVING)
        served.gate.open()
        while (event := await call.read()) is not grpc.aio.EOF:
            events.append(event)
        assert tokens_of(events) == Oracle().expected_tokens(PROMPT, 8)
        assert finish_of(events)
        await stop


async def test_the_process_serves_until_sigterm(tmp_path):
    environment = os.environ | {"QUIRE_DATA": str(tmp_path), "QUIRE_RUNTIME_ADDRESS": "127.0.0.1:0"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "runtime_service", env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        address = json.loads(await process.stdout.readline())["address"]
        async with grpc.aio.insecure_channel(address) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="liveness"))
            assert (await check).status == SERVING
        process.send_signal(signal.SIGTERM)
        _, log = await process.communicate()
        assert process.returncode == 0, log
        assert [line for line in map(json.loads, log.splitlines()) if line["event"] == "drained"]
    finally:
        if process.returncode is None:
            process.kill()

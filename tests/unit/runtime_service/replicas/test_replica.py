"""What the front knows of a replica that no longer answers."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio

from runtime_service.replicas import replica as replica_module
from runtime_service.replicas.replica import Replica
from shared.pb.quire.v1 import control_pb2, control_pb2_grpc
from shared.rpc.server import LIVENESS


class _Hanging(control_pb2_grpc.ControlServicer):
    """Reports once, then takes every call and answers none until it is let go on."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.answers.set()

    async def GetLoad(self, request: control_pb2.GetLoadRequest, context: object) -> control_pb2.GetLoadResponse:
        await self.answers.wait()
        return control_pb2.GetLoadResponse(engines=[control_pb2.EngineLoad(name="tiny", pages_total=4, pages_free=4)])


async def test_a_replica_that_hangs_serves_nothing_until_it_answers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "REPORT_TIMEOUT_S", 0.2)
    hanging, server = _Hanging(), grpc.aio.server()
    control_pb2_grpc.add_ControlServicer_to_server(hanging, server)
    health = aio.HealthServicer()
    await health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    replica = Replica(f"127.0.0.1:{port}")
    await replica.refresh()
    reports = asyncio.create_task(replica.keep_fresh())

    async def until(serves: bool) -> None:
        while (replica.is_live, replica.load("tiny") is not None) != (serves, serves):
            await asyncio.sleep(0.01)

    try:
        hanging.answers.clear()
        await asyncio.wait_for(until(serves=False), 5.0)
        hanging.answers.set()
        await asyncio.wait_for(until(serves=True), 5.0)
        await health.set(LIVENESS, health_pb2.HealthCheckResponse.NOT_SERVING)  # its loop stands still
        await asyncio.wait_for(until(serves=False), 5.0)
    finally:
        reports.cancel()
        await replica.close()
        await server.stop(None)

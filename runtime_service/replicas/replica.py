"""One runtime process behind the front: its channel, and its load as it was last reported."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from runtime_service.replicas.balance import ReplicaLoad
from shared.pb.quire.v1 import control_pb2, control_pb2_grpc, inference_pb2_grpc
from shared.rpc.server import LIVENESS, MAX_MESSAGE_BYTES

REPORT_PERIOD_S = 0.1
"""How old the pages a request takes may be. How many are under way is known at any moment, so a burst does not land on one."""
REPORT_TIMEOUT_S = 5.0
"""A replica that has not answered by then, its process stopped, say, counts as one that does not."""


class Replica:
    """The runtime that serves at `address`, a loopback address. `under_way` holds the calls sent and not ended, by engine."""

    def __init__(self, address: str) -> None:
        sizes = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.max_send_message_length", MAX_MESSAGE_BYTES)]
        self.channel = grpc.aio.insecure_channel(address, options=sizes)
        self.inference = inference_pb2_grpc.InferenceStub(self.channel)
        self.control = control_pb2_grpc.ControlStub(self.channel)
        self._health = health_pb2_grpc.HealthStub(self.channel)
        self.is_live = True
        self.under_way: defaultdict[str, set[object]] = defaultdict(set)
        self._loads: dict[str, ReplicaLoad] = {}

    def load(self, engine: str) -> ReplicaLoad | None:
        """None where it does not serve `engine`, or has not said so yet."""
        return self._loads.get(engine)

    def num_under_way(self, engine: str) -> int:
        """0 for an engine it has never been sent to, whatever its name."""
        return len(self.under_way.get(engine, ()))

    async def refresh(self) -> None:
        """Take a new report. Without one within REPORT_TIMEOUT_S, or while its serving loop stands still, it is not live and serves
        nothing."""
        alive = health_pb2.HealthCheckRequest(service=LIVENESS)
        try:
            health = await self._health.Check(alive, timeout=REPORT_TIMEOUT_S)
            report = await self.control.GetLoad(control_pb2.GetLoadRequest(), timeout=REPORT_TIMEOUT_S)
            self.is_live = health.status == health_pb2.HealthCheckResponse.SERVING
        except grpc.aio.AioRpcError:
            self.is_live = False
        loads = report.engines if self.is_live else ()
        self._loads = {load.name: ReplicaLoad(load.pages_total, load.pages_free, load.requests_running) for load in loads}

    async def keep_fresh(self) -> None:
        """For ever: a report every REPORT_PERIOD_S."""
        while True:
            await self.refresh()
            await asyncio.sleep(REPORT_PERIOD_S)

    async def close(self) -> None:
        await self.channel.close()

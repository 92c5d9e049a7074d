"""quire.v1.Control: engines, load, lifecycle. What blocks runs on a thread: engines come and go on threads of their own, so that
however many calls wait for their turn, none keeps a drain or a question waiting."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor

import grpc

from runtime_service.config import RuntimeSettings
from runtime_service.core.load_request import LoadRequest
from runtime_service.loop import ServingLoop
from runtime_service.service import convert, describe
from runtime_service.service.engines import Engines
from shared.ids import RequestId, check_artifact_id, check_name
from shared.pb.quire.v1 import control_pb2 as pb
from shared.pb.quire.v1 import control_pb2_grpc

MAX_GRACE_S = 600.0
"""Longest wait that UnloadEngine and Drain may ask for."""


class ControlServicer(control_pb2_grpc.ControlServicer):
    def __init__(self, loop: ServingLoop, engines: Engines, settings: RuntimeSettings, loading: Executor) -> None:
        self._loop = loop
        self._engines = engines
        self._settings = settings
        self._loading = loading

    async def LoadEngine(self, request: pb.LoadEngineRequest, context: grpc.aio.ServicerContext) -> pb.LoadEngineResponse:
        load = LoadRequest(
            artifact_id=request.artifact_id,
            name=request.name or check_artifact_id(request.artifact_id)[:12],
            num_pages=request.num_pages if request.HasField("num_pages") else None,
            kv_bytes=request.kv_bytes if request.HasField("kv_bytes") else None,
            compaction=convert.default_compaction(request.default_compaction) if request.HasField("default_compaction") else None,
            prefix_caching=request.prefix_caching or not request.HasField("prefix_caching"),
        )
        loaded = await asyncio.get_running_loop().run_in_executor(self._loading, self._engines.load, load)
        return pb.LoadEngineResponse(engine=describe.engine_message(loaded))

    async def UnloadEngine(self, request: pb.UnloadEngineRequest, context: grpc.aio.ServicerContext) -> pb.UnloadEngineResponse:
        grace_s = convert.grace_seconds(request.grace, "grace", MAX_GRACE_S)
        await asyncio.get_running_loop().run_in_executor(self._loading, self._engines.unload, request.name, grace_s)
        return pb.UnloadEngineResponse()

    async def ListEngines(self, request: pb.ListEnginesRequest, context: grpc.aio.ServicerContext) -> pb.ListEnginesResponse:
        return pb.ListEnginesResponse(engines=[describe.engine_message(engine) for engine in self._engines.all()])

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext) -> pb.GetServerInfoResponse:
        return await asyncio.to_thread(describe.server_info, self._settings)

    async def GetLoad(self, request: pb.GetLoadRequest, context: grpc.aio.ServicerContext) -> pb.GetLoadResponse:
        self._loop.check_alive()  # who balances by this must not send here any more
        load = self._loop.load()
        return pb.GetLoadResponse(engines=[describe.load_message(engine) for engine in load.engines], draining=load.draining)

    async def GetCompactionStats(
        self, request: pb.GetCompactionStatsRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetCompactionStatsResponse:
        """Of the engine that is named, by whatever name it is served; of all where none is."""
        wanted = self._engines.find(request.engine).name if request.engine else None
        loads = [load for load in self._loop.load().engines if wanted in (None, load.name)]
        return pb.GetCompactionStatsResponse(engines=[describe.compaction_stats(load) for load in loads])

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        return pb.AbortResponse(aborted=self._loop.abort(RequestId(check_name(request.request_id, field="request_id"))))

    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext) -> pb.DrainResponse:
        deadline_s = convert.grace_seconds(request.deadline, "deadline", MAX_GRACE_S)
        report = await asyncio.to_thread(self._loop.drain, deadline_s)
        return pb.DrainResponse(finished=report.finished, aborted=report.aborted)

"""One address for several runtimes that serve the same engines, each from its own device (data parallel).

A request goes whole to one replica and stays there. What concerns engines goes to all of them; readings are sums. Errors of a
replica are passed on as they are.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

import grpc

from runtime_service.replicas.balance import least_loaded
from runtime_service.replicas.replica import Replica
from shared.errors import ModelNotFound
from shared.ids import new_id
from shared.pb.quire.v1 import control_pb2 as pb
from shared.pb.quire.v1 import control_pb2_grpc, inference_pb2, inference_pb2_grpc
from shared.rpc.status import from_rpc_error

_Answer = TypeVar("_Answer")
_Reading = TypeVar("_Reading", pb.EngineLoad, pb.CompactionStats)


class InferenceFront(inference_pb2_grpc.InferenceServicer):
    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        replica = await self._choose(request.engine)
        if not request.request_id:
            request.request_id = new_id()  # one that no other replica gives out
        call = replica.inference.Generate(request, metadata=context.invocation_metadata())
        under_way = replica.under_way[request.engine]
        under_way.add(call)

        def end(_: object) -> None:
            under_way.discard(call)
            call.cancel()

        context.add_done_callback(end)  # a client that left, at whatever moment; its generator may be abandoned
        try:
            async for event in call:
                yield event
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            end(call)

    async def _choose(self, engine: str) -> Replica:
        """ModelNotFound where no replica serves `engine`, also after they were asked again."""
        for _ in range(2):
            chosen = least_loaded([r.load(engine) for r in self._replicas], [r.num_under_way(engine) for r in self._replicas])
            if chosen is not None:
                return self._replicas[chosen]
            await asyncio.gather(*(replica.refresh() for replica in self._replicas))
        raise ModelNotFound(f"no replica serves an engine named {engine[:80]!r}; load it, by that name")


class ControlFront(control_pb2_grpc.ControlServicer):
    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas

    async def LoadEngine(self, request: pb.LoadEngineRequest, context: grpc.aio.ServicerContext) -> pb.LoadEngineResponse:
        """On every replica, or on none: where one refuses, the others unload it again."""
        before = {engine.name for engine in (await self._all(lambda r: r.control.ListEngines(pb.ListEnginesRequest())))[0].engines}
        loads = (replica.control.LoadEngine(request) for replica in self._replicas)
        answers = await asyncio.gather(*loads, return_exceptions=True)
        loaded = [(r, a) for r, a in zip(self._replicas, answers, strict=True) if isinstance(a, pb.LoadEngineResponse)]
        for failure in answers:
            if isinstance(failure, BaseException):
                undo = [
                    r.control.UnloadEngine(pb.UnloadEngineRequest(name=a.engine.name))
                    for r, a in loaded
                    if a.engine.name not in before
                ]
                await asyncio.gather(*undo, return_exceptions=True)  # one that is gone serves nothing anyway
                raise from_rpc_error(failure) if isinstance(failure, grpc.aio.AioRpcError) else failure
        await asyncio.gather(*(replica.refresh() for replica in self._replicas))
        return pb.LoadEngineResponse(engine=_whole([answer.engine for _, answer in loaded]))

    async def UnloadEngine(self, request: pb.UnloadEngineRequest, context: grpc.aio.ServicerContext) -> pb.UnloadEngineResponse:
        await self._all(lambda replica: replica.control.UnloadEngine(request))
        await asyncio.gather(*(replica.refresh() for replica in self._replicas))
        return pb.UnloadEngineResponse()

    async def ListEngines(self, request: pb.ListEnginesRequest, context: grpc.aio.ServicerContext) -> pb.ListEnginesResponse:
        by_name = defaultdict(list)
        for answer in await self._all(lambda replica: replica.control.ListEngines(request)):
            for engine in answer.engines:
                by_name[engine.name].append(engine)
        return pb.ListEnginesResponse(engines=[_whole(engines) for engines in by_name.values()])

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext) -> pb.GetServerInfoResponse:
        """The first replica's: they are alike. As many requests may wait as wait on all of them."""
        answers = await self._all(lambda replica: replica.control.GetServerInfo(request))
        info: pb.GetServerInfoResponse = answers[0]
        info.max_waiting_requests = sum(answer.max_waiting_requests for answer in answers)
        return info

    async def GetLoad(self, request: pb.GetLoadRequest, context: grpc.aio.ServicerContext) -> pb.GetLoadResponse:
        answers = await self._all(lambda replica: replica.control.GetLoad(request))
        loads = _sums([load for answer in answers for load in answer.engines], "name")
        return pb.GetLoadResponse(engines=loads, draining=any(answer.draining for answer in answers))

    async def GetCompactionStats(
        self, request: pb.GetCompactionStatsRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetCompactionStatsResponse:
        answers = await self._all(lambda replica: replica.control.GetCompactionStats(request))
        return pb.GetCompactionStatsResponse(engines=_sums([stats for answer in answers for stats in answer.engines], "engine"))

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        answers = await self._all(lambda replica: replica.control.Abort(request))
        return pb.AbortResponse(aborted=any(answer.aborted for answer in answers))

    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext) -> pb.DrainResponse:
        answers = await self._all(lambda replica: replica.control.Drain(request))
        return pb.DrainResponse(finished=sum(a.finished for a in answers), aborted=sum(a.aborted for a in answers))

    async def _all(self, call: Callable[[Replica], Awaitable[_Answer]]) -> list[_Answer]:
        try:
            return list(await asyncio.gather(*(call(replica) for replica in self._replicas)))
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error


def _whole(engines: Sequence[pb.Engine]) -> pb.Engine:
    """One engine of several replicas: the memory of all, the slowest load."""
    whole = pb.Engine()
    whole.CopyFrom(engines[0])
    whole.num_pages = sum(engine.num_pages for engine in engines)
    whole.kv_bytes = sum(engine.kv_bytes for engine in engines)
    whole.load_s = max(engine.load_s for engine in engines)
    return whole


def _sums(messages: Sequence[_Reading], key: str) -> list[_Reading]:
    """Messages with the same `key` as one, every other field summed."""
    sums: dict[str, _Reading] = {}
    for message in messages:
        name = getattr(message, key)
        if name not in sums:
            sums[name] = type(message)()
            sums[name].CopyFrom(message)
            continue
        for field in message.DESCRIPTOR.fields:
            if field.name != key:
                setattr(sums[name], field.name, getattr(sums[name], field.name) + getattr(message, field.name))
    return list(sums.values())

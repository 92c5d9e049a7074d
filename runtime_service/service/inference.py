"""quire.v1.Inference: validate, convert, submit, stream."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncIterator

import grpc
import structlog

from runtime_service.config import RuntimeSettings
from runtime_service.core.request import GenerationRequest
from runtime_service.loop import ServingLoop
from runtime_service.service import convert
from runtime_service.service.engines import Engines, LoadedEngine
from runtime_service.service.trace import RequestTrace
from runtime_service.streaming.stream import TokenStream
from shared.ids import RequestId, check_name, new_id
from shared.pb.quire.v1 import inference_pb2, inference_pb2_grpc
from shared.telemetry.trace import Tracer, traceparent_of


class InferenceServicer(inference_pb2_grpc.InferenceServicer):
    def __init__(self, loop: ServingLoop, engines: Engines, settings: RuntimeSettings, tracer: Tracer) -> None:
        self._loop = loop
        self._engines = engines
        self._settings = settings
        self._tracer = tracer

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        engine = self._engines.find(request.engine)
        generation = await self._convert(request, engine)
        structlog.contextvars.bind_contextvars(request_id=generation.request_id, engine=engine.name)
        stream = TokenStream(stall_after_s=self._settings.stall_after_s, readers=self._loop.readers)
        trace, traceparent = RequestTrace(generation), traceparent_of(context.invocation_metadata())
        self._loop.submit(generation, stream)

        def end(_: object) -> None:
            self._leave(generation.request_id, stream)
            self._tracer(trace.end(), traceparent)

        # grpc.aio abandons the generator of a call that ends while a write is under way; this it always calls.
        context.add_done_callback(end)
        try:
            accepted = inference_pb2.Accepted(request_id=generation.request_id, prompt_tokens=len(generation.prompt_ids))
            yield inference_pb2.GenerateResponse(accepted=accepted)
            async for event in stream:
                trace.note(event)
                yield convert.response(event)
        finally:
            self._leave(generation.request_id, stream)

    def _leave(self, request_id: RequestId, stream: TokenStream) -> None:
        """Nobody reads `stream` any more. A request that has ended by itself is left alone: its id may be another's by now."""
        if not stream.closed:
            stream.close()
            self._loop.abort(request_id)

    async def _convert(self, request: inference_pb2.GenerateRequest, engine: LoadedEngine) -> GenerationRequest:
        """Everything cheap is checked before the prompt is tokenised; the clock starts when the call came in."""
        now, settings = time.monotonic(), self._settings
        queue_s, run_s = settings.max_queue_s, settings.max_run_s
        if request.HasField("queue_timeout"):
            queue_s = convert.seconds(request.queue_timeout, "queue_timeout", queue_s)
        if request.HasField("run_timeout"):
            run_s = convert.seconds(request.run_timeout, "run_timeout", run_s)
        checked = GenerationRequest(
            request_id=RequestId(check_name(request.request_id, field="request_id") if request.request_id else new_id()),
            engine=engine.name,
            prompt_ids=(),
            sampling=convert.sampling_params(request.sampling),
            stop=convert.stop_params(request.stopping, settings.max_generated_tokens),
            compaction=convert.compaction_params(request.kv, engine.compaction),
            priority=convert.priority(request),
            queue_deadline=now + queue_s,
            run_deadline=now + run_s,
            cache_salt=convert.cache_salt(request.kv),
        )
        return dataclasses.replace(checked, prompt_ids=await engine.prompts.encode(request))

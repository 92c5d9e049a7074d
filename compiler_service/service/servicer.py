"""quire.v1.Compiler: validate, convert, call, convert."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import TypeVar

import grpc

from compiler_service.metrics import CompilerMetrics
from compiler_service.service import artifacts, convert
from compiler_service.service.explain import Explainer
from compiler_service.service.flight import flight_digest
from compiler_service.service.host import build_capabilities
from compiler_service.spec import CompileSpec, decode_spec, encode_spec
from shared.artifacts.store import ArtifactStore
from shared.errors import JobStateConflict
from shared.ids import check_artifact_id, check_name
from shared.jobs.job import JobLimits, JobState
from shared.jobs.queue import JobQueue, Submission
from shared.pb.quire.v1 import compiler_pb2 as pb
from shared.pb.quire.v1 import compiler_pb2_grpc
from shared.telemetry.trace import traceparent_of

DEFAULT_PAGE = 50
_T = TypeVar("_T")


class CompilerServicer(compiler_pb2_grpc.CompilerServicer):
    """`builder` is the digest of what builds here (flight.py); `model_roots` confine every source. What blocks, on a store or on a
    source's disk, runs on `threads`, which nothing else uses: when a bucket hangs, builds must still be watched and ended.
    """

    def __init__(
        self,
        queue: JobQueue,
        store: ArtifactStore,
        explainer: Explainer,
        model_roots: Sequence[Path],
        builder: str,
        metrics: CompilerMetrics,
        threads: Executor,
    ) -> None:
        self._queue, self._store, self._explainer = queue, store, explainer
        self._model_roots, self._builder = tuple(model_roots), builder
        self._metrics, self._threads = metrics, threads

    async def CreateCompileJob(
        self, request: pb.CreateCompileJobRequest, context: grpc.aio.ServicerContext
    ) -> pb.CreateCompileJobResponse:
        request_id = check_name(request.request_id, field="request_id")
        spec, limits = convert.spec_from(request.spec), convert.limits_from(request.limits)
        submission = await self._submit(request_id, spec, limits, traceparent_of(context.invocation_metadata()))
        return pb.CreateCompileJobResponse(job=convert.job_message(submission.job), created=submission.created)

    async def _submit(self, request_id: str, spec: CompileSpec, limits: JobLimits, traceparent: str) -> Submission:
        digest = await self._off_loop(flight_digest, spec, self._model_roots, self._builder)
        encoded = encode_spec(spec)
        submit = partial(
            self._queue.submit, request_id=request_id, spec=encoded, spec_digest=digest, limits=limits, traceparent=traceparent
        )
        submission = await submit()
        finished = submission.job.artifact_id
        if not submission.created and finished and not await self._off_loop(self._store.contains, finished):
            submission = await submit(reuse_finished=False)  # it had been built, and its artifact has been deleted since
        if not submission.created:
            self._metrics.note_joined()
        return submission

    async def GetCompileJob(self, request: pb.GetCompileJobRequest, context: grpc.aio.ServicerContext) -> pb.GetCompileJobResponse:
        return pb.GetCompileJobResponse(job=convert.job_message(await self._queue.get(_job_id(request.job_id))))

    async def ListCompileJobs(
        self, request: pb.ListCompileJobsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListCompileJobsResponse:
        states = {convert.state_from(value) for value in request.states}
        page = await self._queue.list(states=states, page_size=request.page_size or DEFAULT_PAGE, page_token=request.page_token)
        return pb.ListCompileJobsResponse(jobs=map(convert.job_message, page.jobs), next_page_token=page.next_page_token)

    async def WatchCompileJob(
        self, request: pb.WatchCompileJobRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WatchCompileJobResponse]:
        job_id = _job_id(request.job_id)
        async for event in self._queue.watch(job_id, after_sequence=request.after_sequence):
            ended = await self._queue.get(job_id) if event.state.is_terminal else None
            yield pb.WatchCompileJobResponse(event=convert.event_message(event, ended))

    async def CancelCompileJob(
        self, request: pb.CancelCompileJobRequest, context: grpc.aio.ServicerContext
    ) -> pb.CancelCompileJobResponse:
        return pb.CancelCompileJobResponse(job=convert.job_message(await self._queue.cancel(_job_id(request.job_id))))

    async def RetryCompileJob(
        self, request: pb.RetryCompileJobRequest, context: grpc.aio.ServicerContext
    ) -> pb.RetryCompileJobResponse:
        request_id = check_name(request.request_id, field="request_id")
        job = await self._queue.get(_job_id(request.job_id))
        if not job.state.is_terminal or job.state is JobState.SUCCEEDED:
            raise JobStateConflict(f"only a job that ended without an artifact can be retried; {job.job_id} is {job.state}")
        traceparent = traceparent_of(context.invocation_metadata())
        submission = await self._submit(request_id, decode_spec(job.spec), job.limits, traceparent)
        return pb.RetryCompileJobResponse(job=convert.job_message(submission.job))

    async def ExplainModel(self, request: pb.ExplainModelRequest, context: grpc.aio.ServicerContext) -> pb.ExplainModelResponse:
        caches = await self._explainer.explain(await self._checked_spec(request.spec))
        proved = bool(caches) and all(not certificate.reason for certificate in caches)
        return pb.ExplainModelResponse(caches=map(convert.proof_message, caches), proved=proved)

    async def _checked_spec(self, message: pb.CompileSpec) -> CompileSpec:
        """A source that cannot be right is refused before a process is started for it."""
        spec = convert.spec_from(message)
        await self._off_loop(flight_digest, spec, self._model_roots, self._builder)
        return spec

    async def GetArtifact(self, request: pb.GetArtifactRequest, context: grpc.aio.ServicerContext) -> pb.GetArtifactResponse:
        return pb.GetArtifactResponse(artifact=await self._off_loop(artifacts.get, self._store, request.artifact_id))

    async def ListArtifacts(self, request: pb.ListArtifactsRequest, context: grpc.aio.ServicerContext) -> pb.ListArtifactsResponse:
        return await self._off_loop(artifacts.page, self._store, request)

    async def VerifyArtifact(
        self, request: pb.VerifyArtifactRequest, context: grpc.aio.ServicerContext
    ) -> pb.VerifyArtifactResponse:
        return await self._off_loop(artifacts.verify, self._store, request.artifact_id)

    async def DeleteArtifact(
        self, request: pb.DeleteArtifactRequest, context: grpc.aio.ServicerContext
    ) -> pb.DeleteArtifactResponse:
        await self._off_loop(self._store.delete, check_artifact_id(request.artifact_id))
        return pb.DeleteArtifactResponse()

    async def SignArtifact(self, request: pb.SignArtifactRequest, context: grpc.aio.ServicerContext) -> pb.SignArtifactResponse:
        return await self._off_loop(artifacts.sign, self._store, request)

    async def CollectGarbage(
        self, request: pb.CollectGarbageRequest, context: grpc.aio.ServicerContext
    ) -> pb.CollectGarbageResponse:
        return await self._off_loop(artifacts.collect, self._store, request)

    async def ExplainMiss(self, request: pb.ExplainMissRequest, context: grpc.aio.ServicerContext) -> pb.ExplainMissResponse:
        spec = await self._checked_spec(request.spec)
        return await self._off_loop(artifacts.explain_miss, self._store, await self._explainer.key(spec))

    async def CheckCompatibility(
        self, request: pb.CheckCompatibilityRequest, context: grpc.aio.ServicerContext
    ) -> pb.CheckCompatibilityResponse:
        return await self._off_loop(artifacts.compatibility, self._store, request)

    async def GetBuildCapabilities(
        self, request: pb.GetBuildCapabilitiesRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetBuildCapabilitiesResponse:
        return await self._off_loop(build_capabilities)

    async def _off_loop(self, call: Callable[..., _T], *arguments: object) -> _T:
        run = partial(copy_context().run, call, *arguments)
        return await asyncio.get_running_loop().run_in_executor(self._threads, run)


def _job_id(value: str) -> str:
    return check_name(value, field="job_id")

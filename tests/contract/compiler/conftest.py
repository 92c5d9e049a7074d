"""The compiler service as its process has it, on loopback, with processes that only pretend to build."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import grpc
import pytest

from compiler_service.__main__ import Compiler
from compiler_service.config import CompilerSettings
from compiler_service.worker.build_process import Launcher
from shared.artifacts.local import LocalStore
from shared.ids import new_id
from shared.jobs.queue import QueuePolicy
from shared.jobs.sqlite import SQLiteQueue
from shared.kv_spec import Layout
from shared.manifest import SCHEMA_VERSION, FileEntry, ModelManifest, Target, encode_manifest
from shared.pb.quire.v1 import common_pb2, compiler_pb2_grpc
from shared.pb.quire.v1 import compiler_pb2 as pb
from shared.rpc.status import from_rpc_error
from shared.telemetry.trace import Tracer, untraced
from tests.support.tiny_engine import TinyModel, tiny_manifest

FAKE = (sys.executable, "-m", "tests.support.fake_build")
POLICY = QueuePolicy(lease_s=30.0, retry_delay_s=0.01, max_retry_delay_s=0.02)
EMPTY_SHA256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
ENGINE_ID, MODEL_ID = "e" * 64, "a" * 64


def sizes(minimum: int, maximum: int, opt: int = 0) -> common_pb2.SizeRange:
    return common_pb2.SizeRange(min=minimum, opt=opt, max=maximum)


def profile(name: str, batch: common_pb2.SizeRange, query_len: common_pb2.SizeRange) -> common_pb2.OptimizationProfile:
    return common_pb2.OptimizationProfile(name=name, batch=batch, query_len=query_len)


@dataclass
class Client:
    """A stub, and the few calls the tests repeat. `models` is the service's one model root."""

    stub: compiler_pb2_grpc.CompilerStub
    compiler: Compiler
    models: Path
    store_directory: Path

    @cached_property
    def store(self) -> LocalStore:
        return LocalStore(self.store_directory)

    def source(self, name: str = "m", **plan: Any) -> str:
        """A directory that looks like a checkpoint from outside; a fake build of it does what `plan` says."""
        directory = self.models / name
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(b"weights")
        for file, content in {"config.json": {}, "tokenizer.json": {}, "plan.json": {"end": "built"} | plan}.items():
            (directory / file).write_text(json.dumps(content))
        return name

    def spec(self, named: str, **changes: Any) -> pb.CompileSpec:
        fields = {
            "source": named,
            "backend": common_pb2.BACKEND_INDUCTOR,
            "layout": common_pb2.KV_LAYOUT_PAGED,
            "dtype": common_pb2.ELEMENT_TYPE_FLOAT32,
            "max_len": 512,
            "page_size": 16,
            "profiles": [profile("decode", sizes(1, 8), sizes(1, 1)), profile("prefill", sizes(1, 1), sizes(1, 128))],
        }
        return pb.CompileSpec(**(fields | changes))

    async def create(self, spec: pb.CompileSpec, request_id: str = "", **limits: Any) -> pb.CreateCompileJobResponse:
        request = pb.CreateCompileJobRequest(request_id=request_id or new_id(), spec=spec, limits=pb.JobLimits(**limits))
        return await self.stub.CreateCompileJob(request)

    async def events(self, job_id: str, after: int = 0) -> list[pb.JobEvent]:
        call = self.stub.WatchCompileJob(pb.WatchCompileJobRequest(job_id=job_id, after_sequence=after))
        return [response.event async for response in call]

    async def get(self, job_id: str) -> pb.CompileJob:
        return (await self.stub.GetCompileJob(pb.GetCompileJobRequest(job_id=job_id))).job

    async def end_of(self, job_id: str) -> pb.CompileJob:
        await self.events(job_id)
        return await self.get(job_id)

    def publish(
        self,
        artifact_id: str = ENGINE_ID,
        model_id: str = MODEL_ID,
        *,
        with_model: bool = True,
        components: dict[str, str] | None = None,
        fields: dict[str, object] | None = None,
    ) -> None:
        """An engine of one empty file, and the model it needs."""
        base = tiny_manifest(TinyModel().spec(Layout.PAGED, 16, 512), ("decode=8x1", "prefill=1x128"), (1,))
        facts = dataclasses.replace(base.model, model_id=model_id, weights_dtype="float32")
        files = (FileEntry("engine.bin", EMPTY_SHA256, 0),)
        if with_model and not self.store.contains(model_id):
            model = ModelManifest(SCHEMA_VERSION, model_id, "model", facts, (FileEntry("weights.bin", EMPTY_SHA256, 0),))
            self._publish(model_id, "weights.bin", encode_manifest(model))
        toolchain = {"torch": "2.14.1", "ops": "abc"}
        own = {
            "artifact_id": artifact_id,
            "model": facts,
            "backend": "inductor",
            "files": files,
            "toolchain": toolchain,
            "key_components": components or {},
            "target": Target("cpu", ("avx2",), ()),
        }
        engine = dataclasses.replace(base, **own | (fields or {}))
        self._publish(artifact_id, "engine.bin", encode_manifest(engine))

    def _publish(self, artifact_id: str, name: str, manifest: bytes) -> None:
        with self.store.stage() as directory:
            (directory / name).touch()
            assert self.store.publish(artifact_id, directory, manifest)


@contextlib.contextmanager
def refused(reason: str, field: str | None = None):
    """The call fails with this reason (and field); yields a list that then holds the error."""
    caught = []
    with pytest.raises(grpc.RpcError) as failed:
        yield caught
    error = from_rpc_error(failed.value)
    assert error.reason == reason, error
    assert field is None or error.field == field
    caught.append(error)


Starter = Callable[..., AbstractAsyncContextManager[Client]]


@pytest.fixture
def start(tmp_path: Path) -> Starter:
    """Starts a service on the test's own data directory; a second start finds what the first left."""

    @contextlib.asynccontextmanager
    async def started(tracer: Tracer = untraced, **settings: Any) -> AsyncIterator[Client]:
        models = tmp_path / "models"
        models.mkdir(exist_ok=True)
        fields = {"data": tmp_path / "data", "address": "127.0.0.1:0", "model_roots": (models,)} | settings
        chosen = CompilerSettings(**fields)
        chosen.data_directory.mkdir(exist_ok=True)
        queue = SQLiteQueue(Path(chosen.queue_location), POLICY)
        async with (
            Compiler(chosen, queue, Launcher(chosen.build_directory, FAKE), tracer) as compiler,
            grpc.aio.insecure_channel(compiler.address) as channel,
        ):
            stub = compiler_pb2_grpc.CompilerStub(channel)
            yield Client(stub, compiler, models, Path(chosen.store_location.place))

    return started


@pytest.fixture
async def client(start: Starter) -> AsyncIterator[Client]:
    async with start() as made:
        yield made

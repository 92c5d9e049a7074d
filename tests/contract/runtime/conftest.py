"""The runtime as its process has it, on loopback, with the tiny engine in place of a compiled one.

Artifacts are real ones in a real store; only the step from an artifact to an Engine is the test's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel

from runtime_service.__main__ import Runtime
from runtime_service.config import RuntimeSettings
from runtime_service.session.load import EngineLoad
from shared.artifacts.local import LocalStore
from shared.artifacts.store import ArtifactHandle
from shared.errors import QuireError
from shared.kv_spec import Layout
from shared.manifest import SCHEMA_VERSION, FileEntry, ModelManifest, decode_engine_manifest, encode_manifest
from shared.pb.quire.v1 import control_pb2, control_pb2_grpc, inference_pb2_grpc
from shared.pb.quire.v1 import inference_pb2 as pb
from shared.rpc.status import from_rpc_error
from shared.telemetry.trace import Tracer, untraced
from tests.support.tiny_engine import TinyEngine, tiny_tokenizer

MODEL_ID, PAGED_ID, LINEAR_ID = "a" * 64, "b" * 64, "c" * 64
NUM_PAGES = 65


def spaced_tokenizer(word_size: int) -> Tokenizer:
    """The tiny engine's words, filled up to `word_size` letters; a text prompt is words with spaces between them."""
    vocab = {token.ljust(word_size, "x"): index for token, index in tiny_tokenizer().get_vocab().items()}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


class Gate:
    """Stands before every engine step. Closed, it holds the serving loop but for the steps it lets through one by one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._permits: int | None = None  # None = open
        self._waiting = False
        self.steps = 0
        self.fail_with: Exception | None = None

    def __call__(self, _: object) -> None:
        with self._changed:
            self._waiting = True
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._permits != 0, 60), "a test left the gate closed"
            self._waiting = False
            self._permits = None if self._permits is None else self._permits - 1
            self.steps += 1
            error, self.fail_with = self.fail_with, None
        if error is not None:
            raise error

    def close(self) -> None:
        self._set(0)

    def open(self) -> None:
        self._set(None)

    def let_through(self, steps: int) -> None:
        self._set(steps)

    def _set(self, permits: int | None) -> None:
        with self._changed:
            self._permits = permits
            self._changed.notify_all()

    async def until_held(self) -> None:
        """The loop stands at the closed gate: everything before that step has happened."""
        await asyncio.to_thread(self._wait_held)

    def _wait_held(self) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._waiting and self._permits == 0, 60)


class TinyLoader:
    """Turns any engine artifact of `publish_tiny` into a TinyEngine that answers to its manifest."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.engines: list[TinyEngine] = []
        self.allowed = threading.Event()
        self.allowed.set()

    def load(self, engine: ArtifactHandle, model: ArtifactHandle) -> TinyEngine:
        assert self.allowed.wait(60), "a test left the loader closed"
        manifest = decode_engine_manifest(engine.manifest_bytes)
        tiny = TinyEngine(layout=manifest.cache.layout, page_size=manifest.cache.page_size, max_len=manifest.cache.max_len)
        tiny.manifest = manifest
        tiny.on_run = self._gate
        self.engines.append(tiny)
        model.close()
        engine.close()
        return tiny


def publish_tiny(store: LocalStore, words: Tokenizer) -> None:
    """A model artifact with its tokenizer, a paged and a linear engine artifact."""
    tokenizer = words.to_str().encode()
    entry = FileEntry("tokenizer.json", hashlib.sha256(tokenizer).hexdigest(), len(tokenizer))
    for artifact_id, layout in ((PAGED_ID, Layout.PAGED), (LINEAR_ID, Layout.LINEAR)):
        manifest = TinyEngine(layout=layout).manifest
        facts = dataclasses.replace(manifest.model, model_id=MODEL_ID)
        with store.stage() as staged:
            engine = dataclasses.replace(manifest, artifact_id=artifact_id, model=facts, backend="inductor")
            store.publish(artifact_id, staged, encode_manifest(engine))
    with store.stage() as staged:
        (staged / entry.path).write_bytes(tokenizer)
        store.publish(MODEL_ID, staged, encode_manifest(ModelManifest(SCHEMA_VERSION, MODEL_ID, "model", facts, (entry,))))


@dataclasses.dataclass
class Served:
    """A running runtime and one channel to it."""

    runtime: Runtime
    gate: Gate
    loader: TinyLoader
    channel: grpc.aio.Channel

    @property
    def inference(self) -> inference_pb2_grpc.InferenceStub:
        return inference_pb2_grpc.InferenceStub(self.channel)

    @property
    def control(self) -> control_pb2_grpc.ControlStub:
        return control_pb2_grpc.ControlStub(self.channel)

    async def load(self, artifact_id: str = PAGED_ID, **fields) -> control_pb2.Engine:
        request = control_pb2.LoadEngineRequest(**({"artifact_id": artifact_id, "name": "tiny", "num_pages": NUM_PAGES} | fields))
        return (await self.control.LoadEngine(request)).engine

    async def events(self, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
        return [event async for event in self.inference.Generate(request)]

    async def engine_load(self, name: str = "tiny") -> control_pb2.EngineLoad:
        loads = (await self.control.GetLoad(control_pb2.GetLoadRequest())).engines
        return next(load for load in loads if load.name == name)

    async def until_ended(self, count: int) -> EngineLoad:
        """All of the engine's `count` requests so far have ended; then every page is back. The test's timeout bounds the wait."""
        while True:
            (load,) = (engine for engine in self.runtime.loop.load().engines if engine.name == "tiny")
            if load.requests_finished + load.requests_cancelled + load.requests_failed == count:
                assert (load.requests_running, load.requests_waiting, load.pages_free) == (0, 0, load.pages_total)
                return load
            await asyncio.sleep(0.005)


def generate(prompt, max_tokens=8, *, engine="tiny", request_id="", sampling=None, kv=None, **stopping) -> pb.GenerateRequest:
    """Greedy through the end of text; a prompt is text or ids."""
    source = {"text": prompt} if isinstance(prompt, str) else {"token_ids": pb.TokenIds(ids=prompt)}
    return pb.GenerateRequest(
        request_id=request_id,
        engine=engine,
        sampling=sampling or pb.Sampling(),
        stopping=pb.Stopping(max_tokens=max_tokens, **({"ignore_eos": True} | stopping)),
        kv=kv or pb.KVOptions(),
        **source,
    )


def kinds(events) -> list[str]:
    return [event.WhichOneof("event") for event in events]


def tokens_of(events, index=0) -> list[int]:
    deltas = (event.delta for event in events if event.WhichOneof("event") == "delta")
    return [token_id for delta in deltas if delta.index == index for token_id in delta.token_ids]


def text_of(events, index=0) -> str:
    deltas = (event.delta for event in events if event.WhichOneof("event") == "delta")
    return "".join(delta.text for delta in deltas if delta.index == index)


def finish_of(events, index=0) -> pb.Finished:
    (finished,) = (event.finished for event in events if event.WhichOneof("event") == "finished" and event.finished.index == index)
    return finished


async def refused(call, reason, field="") -> QuireError:
    """The error that `call` fails with, which must have this reason and field."""
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call
    error = from_rpc_error(failure.value)
    assert (error.reason, error.field) == (reason, field), error
    return error


async def listed(served: Served) -> list[control_pb2.Engine]:
    return list((await served.control.ListEngines(control_pb2.ListEnginesRequest())).engines)


@contextlib.asynccontextmanager
async def serve(
    data: Path, word_size: int = 0, loader: TinyLoader | None = None, tracer: Tracer = untraced, **settings
) -> AsyncIterator[Served]:
    gate = Gate()
    loader = loader or TinyLoader(gate)
    store = LocalStore(data / "artifacts")
    publish_tiny(store, spaced_tokenizer(word_size))
    options = {"data": data, "address": "127.0.0.1:0", "drain_s": 0.0} | settings
    try:
        async with Runtime(RuntimeSettings(**options), store, loader, tracer) as runtime:
            async with grpc.aio.insecure_channel(runtime.address) as channel:
                yield Served(runtime, gate, loader, channel)
            gate.open()
    finally:
        gate.open()


@pytest.fixture
async def served(tmp_path) -> AsyncIterator[Served]:
    """A runtime with the paged tiny engine loaded as `tiny`."""
    async with serve(tmp_path) as running:
        await running.load()
        yield running

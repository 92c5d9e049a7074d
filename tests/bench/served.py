"""The runtime as its process has it, on loopback, over an engine that exists already; clients are a process of their own."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from runtime_service.__main__ import Runtime
from runtime_service.config import RuntimeSettings
from runtime_service.core.load_request import LoadRequest
from runtime_service.engine.engine import Engine
from runtime_service.session.load import EngineLoad
from shared.artifacts.local import LocalStore
from shared.artifacts.store import ArtifactHandle
from shared.ids import ArtifactId
from shared.manifest import SCHEMA_VERSION, FileEntry, ModelManifest, encode_manifest

ENGINE = "bench"


@dataclass
class OneEngine:
    """A loader that has loaded already."""

    engine: Engine

    def load(self, engine: ArtifactHandle, model: ArtifactHandle) -> Engine:
        engine.close()
        model.close()
        return self.engine


class Open:
    """The engine is used again after its server has stopped."""

    def __init__(self, engine: Engine) -> None:
        self.manifest, self.runs_ahead, self.run = engine.manifest, engine.runs_ahead, engine.run

    def close(self) -> None: ...


@dataclass
class Served:
    runtime: Runtime

    def load(self) -> EngineLoad:
        (load,) = self.runtime.loop.load().engines
        return load

    async def clients(self, *requests: dict[str, Any]) -> list[dict[str, Any]]:
        """What tests.bench.streams saw of these requests, all sent at once unless one says `delay_s`."""
        command = [sys.executable, "-m", "tests.bench.streams", self.runtime.address, ENGINE]
        process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        out, _ = await process.communicate(json.dumps(requests).encode())
        assert process.returncode == 0, process.returncode
        results: list[dict[str, Any]] = json.loads(out)
        return results


@asynccontextmanager
async def serve(engine: Engine, data: Path, num_pages: int) -> AsyncIterator[Served]:
    """`engine` as `bench` from a pool of `num_pages` pages. Its log is of warnings only: figures are printed beside it."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    store = LocalStore(data / "artifacts")
    words = {f"w{index}": index for index in range(engine.manifest.model.vocab_size)}
    text = Tokenizer(WordLevel(words, unk_token="w0")).to_str().encode()
    entry = FileEntry("tokenizer.json", hashlib.sha256(text).hexdigest(), len(text))
    facts = engine.manifest.model
    model_id, engine_id = ArtifactId(facts.model_id), ArtifactId(engine.manifest.artifact_id)
    with store.stage() as staged:
        (staged / entry.path).write_bytes(text)
        store.publish(model_id, staged, encode_manifest(ModelManifest(SCHEMA_VERSION, model_id, "model", facts, (entry,))))
    with store.stage() as staged:
        store.publish(engine_id, staged, encode_manifest(replace(engine.manifest, files=())))
    settings = RuntimeSettings(data=data, address="127.0.0.1:0", drain_s=0.0, max_waiting_requests=1024)
    async with Runtime(settings, store, OneEngine(Open(engine))) as runtime:
        await asyncio.to_thread(runtime.engines.load, LoadRequest(engine_id, ENGINE, num_pages))
        yield Served(runtime)

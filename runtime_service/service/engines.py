"""The engines of this server: from artifact ids to engines the loop serves, and back."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from runtime_service.compaction.registry import check_policy
from runtime_service.config import RuntimeSettings
from runtime_service.core.params import CompactionParams
from runtime_service.engine.engine import Engine
from runtime_service.loop import ServingLoop
from runtime_service.service.convert import relabel
from runtime_service.service.memory import available_bytes, default_pages, pages_within
from runtime_service.service.prompts import PromptEncoder, PromptLimits
from shared.artifacts.record import read_head
from shared.artifacts.store import ArtifactHandle, ArtifactStore
from shared.errors import ArtifactCorrupt, FieldOutOfRange, InUse, ModelNotFound
from shared.ids import ArtifactId
from shared.manifest import EngineManifest
from shared.profiles import Phase

_ENGINE_KIND = "engine"
_TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What to serve under `name`. The pool has `num_pages` pages, or `kv_bytes` of them, or the server's choice."""

    artifact_id: ArtifactId
    name: str
    num_pages: int | None = None
    kv_bytes: int | None = None
    compaction: CompactionParams | None = None


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine being served. `compaction` is applied to requests that do not choose; `num_pages` counts the dump page."""

    name: str
    manifest: EngineManifest
    num_pages: int
    compaction: CompactionParams | None
    prompts: PromptEncoder
    load_s: float

    @property
    def kv_bytes(self) -> int:
        return self.num_pages * self.manifest.cache.page_bytes


class Loader(Protocol):
    """EngineLoader, or what a test puts in its place."""

    def load(self, engine: ArtifactHandle, model: ArtifactHandle) -> Engine: ...


class Engines:
    """Loads and unloads, one at a time, on the caller's thread: both block. Readings may be taken from any thread."""

    def __init__(
        self, store: ArtifactStore, loader: Loader, loop: ServingLoop, settings: RuntimeSettings, tokenising: Executor
    ) -> None:
        self._store = store
        self._loader = loader
        self._loop = loop
        self._settings = settings
        self._tokenising = tokenising
        self._lock = threading.Lock()
        self._loaded: dict[str, LoadedEngine] = {}

    def all(self) -> tuple[LoadedEngine, ...]:
        """In the order they were loaded."""
        return tuple(self._loaded.values())

    def find(self, name: str) -> LoadedEngine:
        """By name, or by the artifact id of one that is loaded; ModelNotFound."""
        engines = self.all()
        for engine in (*(e for e in engines if e.name == name), *(e for e in engines if e.manifest.artifact_id == name)):
            return engine
        raise self._unknown(name)

    def load(self, request: LoadRequest) -> LoadedEngine:
        """Verify, load and serve. The same artifact under the same name is returned as it is.

        InUse for a name that serves another artifact; ArtifactNotFound, ArtifactCorrupt, EngineIncompatible, MemoryExhausted,
        FieldOutOfRange: nothing is loaded then.
        """
        with self._lock:
            present = self._loaded.get(request.name)
            if present is None:
                return self._load(request)
            if present.manifest.artifact_id != request.artifact_id:
                raise InUse(
                    f"{request.name} serves artifact {present.manifest.artifact_id}; unload it first, or load "
                    f"{request.artifact_id} under another name"
                )
            return present

    def unload(self, name: str, grace_s: float) -> None:
        """Serve no more, wait `grace_s` for its requests, end the rest as retryable, free its memory. ModelNotFound."""
        with self._lock:
            if name not in self._loaded:
                raise self._unknown(name)
            self._loop.remove_engine(name, grace_s)
            del self._loaded[name]

    def _unknown(self, name: str) -> ModelNotFound:
        loaded = ", ".join(self._loaded) or "none"
        return ModelNotFound(f"no engine {name[:80]!r} is loaded (loaded: {loaded}); load it or choose one of these")

    def _load(self, request: LoadRequest) -> LoadedEngine:
        started = time.monotonic()
        with ExitStack() as undo:
            artifact = undo.enter_context(self._store.open(request.artifact_id))
            model_id = _model_of(artifact)
            model = undo.enter_context(self._store.open(model_id))
            tokenizer = read_tokenizer(model.path(_TOKENIZER_FILE))
            engine = self._loader.load(artifact, model)
            undo.callback(engine.close)
            manifest = engine.manifest
            if request.compaction is not None:
                _check_default(request.compaction, manifest)
            num_pages = self._num_pages(request, manifest)
            self._loop.add_engine(request.name, engine, tokenizer, num_pages)
            undo.pop_all()  # the engine holds both artifacts, and the loop the engine, from here on
        limits = PromptLimits(self._settings.max_prompt_bytes, self._settings.max_prompt_tokens)
        prompts = PromptEncoder(tokenizer, limits, self._tokenising)
        loaded = LoadedEngine(request.name, manifest, num_pages, request.compaction, prompts, time.monotonic() - started)
        self._loaded[request.name] = loaded
        return loaded

    def _num_pages(self, request: LoadRequest, manifest: EngineManifest) -> int:
        if request.num_pages is not None:
            if request.num_pages < 2:
                raise FieldOutOfRange(
                    f"num_pages must be at least 2 (one is the dump page); got {request.num_pages}", field="num_pages"
                )
            return request.num_pages
        if request.kv_bytes is not None:
            return pages_within(request.kv_bytes, manifest.cache)
        share = int(available_bytes() * self._settings.kv_memory_fraction)
        return default_pages(manifest.cache, manifest.profiles[Phase.DECODE].batch.max, share)


def _model_of(artifact: ArtifactHandle) -> ArtifactId:
    """The model an engine artifact needs; FieldOutOfRange for an artifact of another kind."""
    head = read_head(artifact.manifest_bytes, artifact_id=artifact.artifact_id)
    if head.kind != _ENGINE_KIND or head.model_id is None:
        raise FieldOutOfRange(f"artifact_id must name an engine; {artifact.artifact_id} is a {head.kind}", field="artifact_id")
    return head.model_id


def read_tokenizer(path: Path) -> Tokenizer:
    """A model's tokenizer as it encodes and decodes text whole: neither truncated nor padded. ArtifactCorrupt."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise ArtifactCorrupt(f"{path.name} must be a tokenizer of the tokenizers library; {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _check_default(compaction: CompactionParams, manifest: EngineManifest) -> None:
    try:
        check_policy(compaction, manifest)
    except FieldOutOfRange as error:
        raise relabel(error, "kv.policy", "default_compaction") from error

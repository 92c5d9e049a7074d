"""The engines of this server: from artifact ids to engines the loop serves, and back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import structlog
from tokenizers import Tokenizer

from runtime_service.compaction.registry import check_policy
from runtime_service.config import RuntimeSettings
from runtime_service.core.load_request import LoadRequest
from runtime_service.core.params import CompactionParams
from runtime_service.engine.engine import Engine
from runtime_service.kv.prefix_cache import can_share
from runtime_service.loop import ServingLoop
from runtime_service.service.convert import of_load_request
from runtime_service.service.memory import available_bytes, available_device_bytes, check_room, default_pages, pages_within
from runtime_service.service.prompts import PromptEncoder, PromptLimits
from runtime_service.service.roster import MAX_ATTEMPTS, Roster, RosterEntry
from shared.artifacts.record import read_head
from shared.artifacts.store import ArtifactHandle, ArtifactStore
from shared.errors import ArtifactCorrupt, FieldOutOfRange, InUse, ModelNotFound, QuireError, Starting, Unavailable
from shared.ids import ArtifactId
from shared.manifest import EngineManifest
from shared.panics import translated
from shared.profiles import Phase

STORE_RETRY_S = 1.0
"""Pause at the start before a store that did not answer is asked again."""
_ENGINE_KIND = "engine"
_TOKENIZER_FILE = "tokenizer.json"
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine being served as `request` asked. `num_pages` counts the dump page."""

    request: LoadRequest
    manifest: EngineManifest
    num_pages: int
    prompts: PromptEncoder
    load_s: float

    @property
    def name(self) -> str:
        return self.request.name

    @property
    def compaction(self) -> CompactionParams | None:
        """Applied to requests that do not choose."""
        return self.request.compaction

    @property
    def prefix_caching(self) -> bool:
        return self.request.prefix_caching and can_share(self.manifest.cache)

    @property
    def kv_bytes(self) -> int:
        return self.num_pages * self.manifest.cache.page_bytes

    def differs_from(self, request: LoadRequest) -> str:
        """What `request` asks for and this engine does not have, in words; empty where it asks for nothing else."""
        pages = pages_within(request.kv_bytes, self.manifest.cache) if request.kv_bytes is not None else request.num_pages
        asked = (
            ("artifact", self.manifest.artifact_id, request.artifact_id),
            ("num_pages", self.num_pages, self.num_pages if pages is None else pages),
            ("default_compaction", self.compaction, self.compaction if request.compaction is None else request.compaction),
            ("prefix_caching", self.request.prefix_caching, self.request.prefix_caching and request.prefix_caching),
        )
        return "; ".join(f"{name} {has}, not {wanted}" for name, has, wanted in asked if has != wanted)


class Loader(Protocol):
    """EngineLoader, or what a test puts in its place."""

    def load(self, engine: ArtifactHandle, model: ArtifactHandle) -> Engine: ...


class Engines:
    """Loads and unloads on the caller's thread: both block. Those of one name take turns, those of others do not wait for them.
    Readings may be taken from any thread.
    """

    def __init__(
        self, store: ArtifactStore, loader: Loader, loop: ServingLoop, settings: RuntimeSettings, tokenising: Executor
    ) -> None:
        self._store = store
        self._loader = loader
        self._loop = loop
        self._settings = settings
        self._tokenising = tokenising
        self._lock = threading.Lock()
        self._turn_ended = threading.Condition(self._lock)
        self._changing: set[str] = set()
        """Names that a load or an unload is at work on."""
        self._room = threading.Lock()
        """Held from asking how much memory is left to taking it."""
        self._loaded: dict[str, LoadedEngine] = {}
        self._roster = Roster(settings.roster_file)
        self._pending = {entry.request.name: entry for entry in self._roster.read()}
        self._stopping = threading.Event()
        self._started = not (settings.engines or self._pending)

    @property
    def is_started(self) -> bool:
        """Whether everything this runtime serves from its start on is loaded."""
        return self._started

    def start(self) -> None:
        """Load the engines of the settings, then those that were loaded when the runtime last ended.

        Raises what keeps an engine of the settings from being loaded; one of the others is logged and given up. A store that does
        not answer is waited for. Returns early after `stop()`.
        """
        if self._started:
            return
        for request in self._settings.engines:
            self._load_at_start(request)
        for entry in tuple(self._pending.values()):
            self._bring_back(entry)
        with self._lock:
            self._remember()
        self._started = not self._stopping.is_set()

    def stop(self) -> None:
        """Begin no further load at the start. What is loaded stays on the list of engines to bring back."""
        self._stopping.set()

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
        """Verify, load and serve. What is loaded under the name is returned where `request` asks for nothing else.

        InUse where it does; ArtifactNotFound, ArtifactCorrupt, EngineIncompatible, MemoryExhausted,
        FieldOutOfRange: nothing is loaded then.
        """
        with self._turn(request.name):
            present = self._loaded.get(request.name)
            if present is None:
                return self._load(request)
            if difference := present.differs_from(request):
                raise InUse(f"{request.name} serves already with {difference}; unload it first, or load under another name")
            return present

    def unload(self, name: str, grace_s: float) -> None:
        """Serve no more, wait `grace_s` for its requests, end the rest as retryable, free its memory. ModelNotFound."""
        with self._turn(name):
            if name not in self._loaded:
                raise self._unknown(name)
            self._loop.remove_engine(name, grace_s)
            with self._lock:
                del self._loaded[name]
                self._remember()

    @contextmanager
    def _turn(self, name: str) -> Iterator[None]:
        """Nobody else loads or unloads `name` meanwhile."""
        with self._lock:
            self._turn_ended.wait_for(lambda: name not in self._changing)
            self._changing.add(name)
        try:
            yield
        finally:
            with self._lock:
                self._changing.discard(name)
                self._turn_ended.notify_all()

    def _load_at_start(self, request: LoadRequest) -> None:
        while not self._stopping.is_set():
            try:
                self.load(request)
                return
            except Unavailable as error:
                _log.warning("engine not loaded yet", engine=request.name, error=error.message)
                self._stopping.wait(STORE_RETRY_S)

    def _bring_back(self, entry: RosterEntry) -> None:
        name = entry.request.name
        with self._lock:
            del self._pending[name]
            if name in self._loaded:
                return
            if entry.attempts >= MAX_ATTEMPTS:
                _log.error("engine given up: the runtime ended while it was loaded", engine=name, attempts=entry.attempts)
                return
            self._pending[name] = replace(entry, attempts=entry.attempts + 1)
            self._remember()
        try:
            self._load_at_start(entry.request)
        except QuireError as error:
            _log.error("engine given up", engine=name, reason=error.reason, error=error.message)
        except Exception:  # noqa: BLE001 - whatever a library raises over its files, the others are served
            _log.exception("engine given up", engine=name)
        with self._lock:
            if self._stopping.is_set():
                self._pending[name] = entry
            else:
                del self._pending[name]

    def _remember(self) -> None:
        """With the lock held. Engines still to be brought back stay on the list."""
        loaded = [RosterEntry(engine.request) for engine in self._loaded.values()]
        self._roster.write([*loaded, *(entry for name, entry in self._pending.items() if name not in self._loaded)])

    def _unknown(self, name: str) -> QuireError:
        if not self._started:
            return Starting(f"{name[:80]!r} is not loaded yet: the runtime is starting", retry_after_s=STORE_RETRY_S)
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
                with of_load_request():
                    check_policy(request.compaction, manifest)
            limits = PromptLimits(self._settings.max_prompt_bytes, self._settings.max_prompt_tokens)
            prompts = PromptEncoder(tokenizer, limits, self._tokenising)
            with self._room:
                num_pages = self._num_pages(request, manifest)
                if manifest.target.device == "cpu":  # a GPU's allocator refuses by itself
                    check_room(num_pages, manifest.cache, available_bytes())
                self._loop.add_engine(request.name, engine, tokenizer, num_pages, prefix_caching=request.prefix_caching)
            undo.pop_all()  # the engine holds both artifacts, and the loop the engine, from here on
        loaded = LoadedEngine(request, manifest, num_pages, prompts, time.monotonic() - started)
        with self._lock:
            self._loaded[request.name] = loaded
            self._remember()
        return loaded

    def _num_pages(self, request: LoadRequest, manifest: EngineManifest) -> int:
        if request.num_pages is not None:
            return request.num_pages
        if request.kv_bytes is not None:
            return pages_within(request.kv_bytes, manifest.cache)
        if manifest.target.device == "cpu":
            share = int(available_bytes() * self._settings.kv_memory_fraction)
        else:
            share = available_device_bytes(self._settings.device_margin_bytes)
        return default_pages(manifest.cache, manifest.profiles[Phase.DECODE].batch.max, share)


def _model_of(artifact: ArtifactHandle) -> ArtifactId:
    """The model an engine artifact needs; FieldOutOfRange for an artifact of another kind."""
    head = read_head(artifact.manifest_bytes, artifact_id=artifact.artifact_id)
    if head.kind != _ENGINE_KIND or head.model_id is None:
        raise FieldOutOfRange(f"artifact_id must name an engine; {artifact.artifact_id} is a {head.kind}", field="artifact_id")
    return head.model_id


def read_tokenizer(path: Path) -> Tokenizer:
    """A model's tokenizer as it encodes and decodes text whole: neither truncated nor padded. ArtifactCorrupt."""
    with translated(lambda error: ArtifactCorrupt(f"{path.name} must be a tokenizer of the tokenizers library; {error}")):
        tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer

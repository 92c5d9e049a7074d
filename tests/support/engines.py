"""Real engines of tiny decoders, compiled once a machine and kept in the cache until a source file that makes them changes."""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

from compiler_service.ingest.digest import DigestCache
from compiler_service.pipeline import Workspace, build
from compiler_service.spec import CompileSpec, profile_set
from shared.artifacts.local import LocalStore
from shared.cache import cache_root
from shared.ids import ArtifactId
from shared.inductor.isa import host_features
from shared.kv_spec import Layout
from shared.manifest import decode_engine_manifest
from tests.support.sources import write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
_MAKERS = (
    "compiler_service/*.py",
    "compiler_service/[beilp]*/**/*.py",
    "shared/*.py",
    "shared/inductor/*.py",
    "shared/kernels/attention/**/*",
    "tests/support/decoders.py",
    "tests/support/engines.py",
    "tests/support/sources.py",
)
PROFILES = ("decode=4x1", "prefill=3x32")
MAX_LEN, PAGE_SIZE = 48, 8


@dataclass(frozen=True)
class TinyEngine:
    """A published engine and the model it must agree with."""

    store: LocalStore
    engine_id: ArtifactId
    model: PreTrainedModel

    @property
    def model_id(self) -> str:
        return decode_engine_manifest(self.store.manifest(self.engine_id)).model.model_id


@cache
def tiny_engine(family: str, layout: Layout, dtype: str = "float32") -> TinyEngine:
    """The engine of tests.support.decoders' `family`; compiling it takes about half a minute, finding it a second."""
    home = cache_root() / "tests" / "engines" / _source_digest()
    home.mkdir(parents=True, exist_ok=True)
    name = f"{family}-{layout}-{dtype}"
    store = LocalStore(home / "store")
    with _locked(home / f"{name}.lock"):
        checkpoint = home / family
        model = write_checkpoint(checkpoint, family)
        known = home / f"{name}.id"
        if not known.exists():
            spec = CompileSpec(
                source=str(checkpoint),
                backend="inductor",
                layout=layout,
                dtype=dtype,
                max_len=MAX_LEN,
                page_size=PAGE_SIZE if layout is Layout.PAGED else MAX_LEN,
                profiles=profile_set(PROFILES),
                targets=("cpu",),
                allow_copying=False,
                constant_weights=False,
            )
            workspace = Workspace(store, DigestCache(home / "digests.json"), None)
            known.write_text(build(spec, workspace, lambda *_: None, lambda: None).artifact_id)
    return TinyEngine(store, ArtifactId(known.read_text()), model.to(getattr(torch, dtype)))


def _source_digest() -> str:
    """Over all that may change an engine: our sources, the libraries, this machine's instruction set."""
    digest = hashlib.sha256(f"{torch.__version__} {transformers.__version__} {sorted(host_features())}".encode())
    for path in sorted(path for pattern in _MAKERS for path in ROOT.glob(pattern)):
        if path.suffix in (".py", ".cpp", ".h"):
            digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

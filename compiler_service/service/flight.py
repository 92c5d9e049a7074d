"""What makes two requests the same build, known without building: one job answers both."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from compiler_service.ingest.checkpoint_files import source_files
from compiler_service.ingest.digest import fingerprint
from compiler_service.ingest.source import locate
from compiler_service.spec import CompileSpec
from shared.code_digest import code_digest
from shared.inductor.isa import host_features
from shared.manifest import canonical_json

_OUR_CODE = ("compiler_service", "shared/inductor", "shared/kernels/attention", "shared/kv_spec.py", "shared/manifest.py")
_MODEL_LIBRARIES = ("torch", "transformers", "gguf", "safetensors", "tokenizers")
_TENSORRT_LIBRARIES = ("tensorrt", "tensorrt-rtx", "torch-tensorrt", "torch-tensorrt-rtx")
_LIBRARIES = _MODEL_LIBRARIES + _TENSORRT_LIBRARIES


def builder_digest() -> str:
    """Digest of whatever builds on this host: our code, the libraries, the processor. Call once: the process cannot change."""
    return hashlib.sha256(
        canonical_json([code_digest(_OUR_CODE), {name: _version(name) for name in _LIBRARIES}, sorted(host_features())])
    ).hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def flight_digest(spec: CompileSpec, model_roots: Sequence[Path], builder: str) -> str:
    """Digest of the spec, of the state of its source's files and of the `builder`. Reads no weights.

    Raises what is wrong with the source as far as its directory and small files tell.
    """
    files = source_files(locate(spec.source, model_roots))
    return hashlib.sha256(canonical_json([spec.digest, fingerprint(files), builder])).hexdigest()

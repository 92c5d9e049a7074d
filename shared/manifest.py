"""The two manifests of the artifact store: a model component (weights, tokenizer) and an engine that refers to it.

Canonical JSON: sorted keys, no spaces, UTF-8, every field present. What is read back is validated strictly: an unknown
or missing key or another type is ArtifactCorrupt. `schema_version` changes whenever a field does.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from shared.bindings import POSITION_IDS, AliasedBinding, BindingSpec
from shared.errors import ArtifactCorrupt
from shared.kv_spec import KVCacheSpec
from shared.profiles import ProfileSet

SCHEMA_VERSION = 1
_STRICT = ConfigDict(extra="forbid", strict=True)
"""pydantic passes the configuration of a dataclass on to the plain dataclasses nested in it."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of the artifact: relative POSIX path, sha256 in hex, size in bytes."""

    path: str
    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the runtime must know of a model without opening its weights. `model_id` is the artifact id of its component."""

    model_id: str
    name: str
    architecture: str
    vocab_size: int
    num_layers: int
    num_heads: int
    max_position: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    weights_dtype: str
    weights_bytes: int


@dataclass(frozen=True, slots=True)
class WriteCertificate:
    """One cache write. `verdict_*` are `proved`, `refuted: ...` or `unknown: ...`; only engines with both proved are published."""

    cache: str
    node: str
    form: str
    axis: int
    start: str
    length: str
    verdict_before: str
    verdict_after: str
    binding: str
    aliased: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Target:
    """Where an engine runs: device kind, CPU instruction sets or CUDA compute capabilities (`sm80`)."""

    device: str
    isa: tuple[str, ...]
    compute_capabilities: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelManifest:
    """A model component: weights, configuration and tokenizer, which the engines of a model share."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    schema_version: int
    artifact_id: str
    kind: str
    facts: ModelFacts
    files: tuple[FileEntry, ...]


@dataclass(frozen=True, slots=True)
class EngineManifest:
    """Everything the runtime needs to refuse or serve an engine.

    `constants` maps an engine constant to a tensor of the weights file.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    schema_version: int
    artifact_id: str
    kind: str
    model: ModelFacts
    cache: KVCacheSpec
    profiles: ProfileSet
    bindings: tuple[BindingSpec, ...]
    aliases: tuple[AliasedBinding, ...]
    backend: str
    target: Target
    toolchain: dict[str, str]
    constants: dict[str, str]
    proof: tuple[WriteCertificate, ...]
    key_components: dict[str, str]
    files: tuple[FileEntry, ...]

    @property
    def takes_positions(self) -> bool:
        """Whether logical positions are an input. They are the cells themselves otherwise, so such an engine's cache cannot be
        compacted."""
        return any(binding.name == POSITION_IDS for binding in self.bindings)


_M = TypeVar("_M", EngineManifest, ModelManifest)


def canonical_json(value: Any) -> bytes:
    """Bytes that are equal exactly when the values are."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def encode_manifest(manifest: EngineManifest | ModelManifest) -> bytes:
    """Canonical JSON: equal manifests give equal bytes."""
    return canonical_json(asdict(manifest))


def _decode(kind: type[_M], data: bytes) -> _M:
    try:
        manifest = TypeAdapter(kind).validate_json(data)
    except (ValidationError, ValueError) as error:
        raise ArtifactCorrupt(f"a manifest of schema {SCHEMA_VERSION} was expected ({kind.__name__}); {error}") from error
    if manifest.schema_version != SCHEMA_VERSION:
        raise ArtifactCorrupt(
            f"a manifest of schema {SCHEMA_VERSION} was expected; got schema {manifest.schema_version}, compile again"
        )
    return manifest


def decode_engine_manifest(data: bytes) -> EngineManifest:
    """ArtifactCorrupt for bytes that are no engine's manifest, or one of another schema."""
    return _decode(EngineManifest, data)


def decode_model_manifest(data: bytes) -> ModelManifest:
    """ArtifactCorrupt as for `decode_engine_manifest`."""
    return _decode(ModelManifest, data)

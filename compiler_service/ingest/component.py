"""The model component of the artifact store: written once from a checked source, opened by every build of that model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from compiler_service.ingest.checkpoint import Checkpoint
from compiler_service.ingest.families import BY_ARCHITECTURE
from compiler_service.ingest.gguf_model import GgufModel
from compiler_service.ingest.model import CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_FILE, IngestedModel
from compiler_service.ingest.program import ARCHITECTURE, ProgramModel
from compiler_service.ingest.safetensors_writer import write_safetensors
from compiler_service.ingest.tokenizer import read_tokenizer, tokenizer_of_gguf
from shared.artifacts.store import ArtifactStore
from shared.errors import SourceInvalid
from shared.ids import ArtifactId
from shared.manifest import SCHEMA_VERSION, FileEntry, ModelFacts, ModelManifest, canonical_json, decode_model_manifest

Progress = Callable[[float, str], None]
"""(fraction 0..1, message)."""


def write_component(
    opened: Checkpoint | GgufModel | ProgramModel, dtype: str, model_id: ArtifactId, directory: Path, progress: Progress
) -> ModelManifest:
    """Fill the empty `directory` with weights (cast to `dtype`), tokenizer and config, and describe them."""
    config = opened.config
    progress(0.0, "tokenizer")
    tokenizer = (
        tokenizer_of_gguf(opened.path) if isinstance(opened, GgufModel) else read_tokenizer(opened.tokenizer, config.vocab_size)
    )
    tokenizer.save(str(directory / TOKENIZER_FILE))
    fields = config.to_dict()
    fields.pop("transformers_version", None)
    (directory / CONFIG_FILE).write_bytes(canonical_json(fields))
    write_safetensors(directory / WEIGHTS_FILE, opened.shapes, getattr(torch, dtype), _reported(opened, progress))
    facts = ModelFacts(
        model_id=model_id,
        name="".join(character if character.isprintable() else " " for character in opened.name)[:128],
        architecture=config.architectures[0],
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        max_position=config.max_position_embeddings,
        bos_token_id=opened.bos_token_id,
        eos_token_ids=opened.eos_token_ids,
        weights_dtype=dtype,
        weights_bytes=(directory / WEIGHTS_FILE).stat().st_size,
    )
    files = tuple(file_entry(directory, name) for name in (CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_FILE))
    return ModelManifest(schema_version=SCHEMA_VERSION, artifact_id=model_id, kind="model", facts=facts, files=files)


def _reported(opened: Checkpoint | GgufModel | ProgramModel, progress: Progress) -> Iterator[tuple[str, torch.Tensor]]:
    total = len(opened.shapes)
    for done, (name, values) in enumerate(opened.tensors()):
        progress(done / total, f"weights {done} of {total}")
        if not torch.isfinite(values).all():
            raise SourceInvalid(f"{name} holds values that are not finite")
        yield name, values


def file_entry(directory: Path, name: str) -> FileEntry:
    """Digest and size of `directory / name`, for a manifest."""
    with (directory / name).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileEntry(name, digest, (directory / name).stat().st_size)


def _config(architecture: str, fields: dict[str, Any]) -> PreTrainedConfig:
    if architecture == ARCHITECTURE:
        return PreTrainedConfig.from_dict(fields)
    return BY_ARCHITECTURE[architecture].config(fields)


@contextmanager
def open_model(store: ArtifactStore, model_id: ArtifactId) -> Iterator[IngestedModel]:
    """The component `model_id`, verified byte for byte and held in the store until the context ends."""
    with store.open(model_id) as handle:
        manifest = decode_model_manifest(handle.manifest_bytes)
        fields = json.loads(handle.path(CONFIG_FILE).read_bytes())
        config = _config(manifest.facts.architecture, fields)
        yield IngestedModel(config, manifest, handle.path(WEIGHTS_FILE), handle.path(TOKENIZER_FILE))

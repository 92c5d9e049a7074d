"""A model component opened for lowering: its facts, its config, and the paths of weights and tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import PreTrainedConfig, PreTrainedModel

from compiler_service.ingest.families import BY_ARCHITECTURE
from compiler_service.ingest.shapes import EMBEDDING, HEAD
from shared.manifest import ModelFacts, ModelManifest

WEIGHTS_FILE, TOKENIZER_FILE, CONFIG_FILE = "weights.safetensors", "tokenizer.json", "config.json"


@dataclass(frozen=True, slots=True)
class IngestedModel:
    """Valid while the artifact it came from is open.

    `weights` holds every tensor of the model under its canonical (`transformers`) name, all of `facts.weights_dtype`; a head
    tied to the embedding is not stored a second time.
    """

    config: PreTrainedConfig
    manifest: ModelManifest
    weights: Path
    tokenizer: Path

    @property
    def facts(self) -> ModelFacts:
        return self.manifest.facts

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def architecture(self) -> str:
        return self.facts.architecture

    @property
    def dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.facts.weights_dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    def file_sha256(self, name: str) -> str:
        """Digest of one of the component's files."""
        return next(entry.sha256 for entry in self.manifest.files if entry.path == name)


def load_decoder(model: IngestedModel) -> PreTrainedModel:
    """The `transformers` module in eval mode with the component's weights mapped into memory, not copied."""
    weights = load_file(model.weights)
    if model.config.tie_word_embeddings:
        weights[HEAD] = weights[EMBEDDING]
    model_class = BY_ARCHITECTURE[model.architecture].model_class
    decoder = model_class.from_pretrained(None, config=model.config, state_dict=weights, dtype=model.dtype)
    return decoder.eval().requires_grad_(False)

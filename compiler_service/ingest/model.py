"""A model component opened for lowering: its facts, its config, and the paths of weights and tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedConfig

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

    def file_sha256(self, name: str) -> str:
        """Digest of one of the component's files."""
        return next(entry.sha256 for entry in self.manifest.files if entry.path == name)

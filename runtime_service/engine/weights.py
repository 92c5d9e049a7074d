"""Weights of models, mapped once however many engines read them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor


@dataclass(frozen=True, eq=False)
class ModelWeights:
    """The tensors of one model by their checkpoint names, mapped from its file: pages are read when first touched."""

    tensors: Mapping[str, Tensor]


class WeightsCache:
    """One ModelWeights a model, for as long as anybody holds it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: weakref.WeakValueDictionary[str, ModelWeights] = weakref.WeakValueDictionary()

    def get(self, model_id: str, file: Path) -> ModelWeights:
        """The model's weights; `file` is mapped if nobody holds them yet."""
        with self._lock:
            weights = self._held.get(model_id)
            if weights is None:
                weights = self._held[model_id] = ModelWeights(load_file(file))
            return weights

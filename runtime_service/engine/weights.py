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
    """The tensors of one model by their checkpoint names. On the host they are mapped from its file: pages are read when first
    touched; on a GPU they are a copy of it."""

    tensors: Mapping[str, Tensor]


class WeightsCache:
    """One ModelWeights a model and device, for as long as anybody holds it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: weakref.WeakValueDictionary[tuple[str, str], ModelWeights] = weakref.WeakValueDictionary()

    def get(self, model_id: str, file: Path, device: str = "cpu") -> ModelWeights:
        """The model's weights on `device`; `file` is read if nobody holds them there yet."""
        with self._lock:
            weights = self._held.get((model_id, device))
            if weights is None:
                weights = self._held[model_id, device] = ModelWeights(load_file(file, device=device))
            return weights

"""Weights of models, mapped once however many engines read them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from shared.errors import MemoryExhausted


@dataclass(frozen=True, eq=False)
class ModelWeights:
    """The tensors of one model by their checkpoint names. On the host they are mapped from its file: pages are read when first
    touched; on a GPU they are a copy of it."""

    tensors: Mapping[str, Tensor]


def require_room(num_bytes: int) -> None:
    """MemoryExhausted unless the GPU has `num_bytes` to give, counting what torch holds in reserve."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    if num_bytes > free:
        raise MemoryExhausted(
            f"the model's weights take {num_bytes} bytes of GPU memory, {free} of {total} are free; unload an engine or serve a "
            "smaller model",
            details={"field": "weights", "expected": f"{num_bytes} bytes", "got": f"{free} bytes"},
        )


class WeightsCache:
    """One ModelWeights a model and device, for as long as anybody holds it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: weakref.WeakValueDictionary[tuple[str, str], ModelWeights] = weakref.WeakValueDictionary()

    def get(self, model_id: str, file: Path, device: str = "cpu") -> ModelWeights:
        """The model's weights on `device`; `file` is read if nobody holds them there yet. MemoryExhausted, with nothing read, when
        they do not fit on a GPU."""
        with self._lock:
            weights = self._held.get((model_id, device))
            if weights is None:
                if device == "cuda":
                    require_room(file.stat().st_size)
                weights = self._held[model_id, device] = ModelWeights(load_file(file, device=device))
            return weights

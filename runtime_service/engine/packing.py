"""The inputs of a step side by side in one buffer, so that one copy brings them to the device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.kernels.upload import upload_into

_ALIGNMENT = 64
"""Elements between the starts of two inputs: Inductor's kernels may read them in vectors of 16 bytes, and TensorRT's assume 256."""


@dataclass(frozen=True, slots=True)
class InputLayout:
    """Where int32 inputs lie in one buffer of `size` elements: (offset, shape) by name."""

    places: dict[str, tuple[int, tuple[int, ...]]]
    size: int

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]]) -> InputLayout:
        """Inputs one behind the other in the order of `shapes`, each at a multiple of 256 bytes."""
        places, offset = {}, 0
        for name, shape in shapes.items():
            places[name] = (offset, shape)
            offset += -(-math.prod(shape) // _ALIGNMENT) * _ALIGNMENT
        return cls(places, offset)

    def view(self, buffer: Tensor, name: str) -> Tensor:
        at, shape = self.places[name]
        return buffer[at : at + math.prod(shape)].view(shape)

    def packed(self, values: Mapping[str, Tensor]) -> Tensor:
        """Every value at its place, on the host, padded with zeros; one that is on the device already is left zero."""
        buffer = np.zeros(self.size, dtype=np.int32)
        for name, (at, shape) in self.places.items():
            if (value := values[name]).device.type == "cpu":
                buffer[at : at + math.prod(shape)].reshape(shape)[_head(value)] = value.numpy()
        return torch.from_numpy(buffer)

    def bring(self, values: Mapping[str, Tensor], buffer: Tensor) -> None:
        """Every value to its place in `buffer`, in the current stream's order: nothing waits for the device."""
        upload_into(buffer[: self.size], self.packed(values))
        for name in self.places:
            if (value := values[name]).device.type != "cpu":
                self.view(buffer, name)[_head(value)].copy_(value)


def _head(value: Tensor) -> tuple[slice, ...]:
    """What `value` fills of an input that is as large or larger in every axis."""
    return tuple(slice(size) for size in value.shape)

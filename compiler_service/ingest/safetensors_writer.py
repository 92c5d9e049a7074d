"""Writes a safetensors file tensor by tensor, so that converting a model never holds more than one of its tensors."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

ALIGNMENT = 64
"""The data starts at a multiple of this many bytes: a cache line, and the widest vector a kernel loads."""
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def write_safetensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Write every tensor of `shapes`, all of one `dtype`, in the order of the mapping; `tensors` must come in that order too.

    Each is cast to `dtype` as it arrives. ValueError when a name or a shape is not the announced one, or one is missing.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    expected = iter(shapes.items())
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors:
            announced = next(expected, None)
            if announced != (name, tuple(tensor.shape)):
                raise ValueError(f"tensor {name} {tuple(tensor.shape)} came where {announced} was announced")
            file.write(tensor.to(dtype).contiguous().view(-1).view(torch.uint8).numpy().data)
        if (missing := next(expected, None)) is not None:
            raise ValueError(f"tensor {missing[0]} was announced and did not come")
        file.flush()
        os.fsync(file.fileno())

"""Pools whose keys have known norms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NUM_PAGES, LAYERS = 7, 3


def pools(layout: str, heads: int, page_size: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    """The keys of every layer, as views of pools that hold values as well."""
    generator = torch.Generator().manual_seed(5)
    shape = (NUM_PAGES, 2, heads, page_size, dim) if layout == "paged" else (2, NUM_PAGES, heads, page_size, dim)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for _ in range(LAYERS)]
    return [(tensor if layout == "paged" else tensor.transpose(0, 1))[:, 0] for tensor in tensors]


def norms_one_by_one(keys: Sequence[Tensor], index: Tensor, length: int) -> Tensor:
    """In double precision, then float32: `[layers * heads, length]`."""
    heads, page_size = keys[0].shape[1:3]
    norms = [
        float(layer[index[token // page_size], head, token % page_size].double().norm())
        for layer in keys
        for head in range(heads)
        for token in range(length)
    ]
    return torch.tensor(norms).view(len(keys) * heads, length)

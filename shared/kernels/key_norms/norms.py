"""Norms of a sequence's keys as they lie in the pools, which a policy scores entries by: one launch, no gathered copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

KeyNorms = Callable[[Tensor, int], Tensor]
"""(page index int64 `[pages]`, length) -> float32 `[layers * kv_heads, length]`, on the pools' device; heads fastest."""


def bind_key_norms(keys: Sequence[Tensor]) -> KeyNorms:
    """Norms over `keys`: each layer's `[num_pages, kv_heads, page_size, head_dim]`, all of one shape, dtype and strides."""
    if keys[0].is_cuda:
        from shared.kernels.key_norms.launch import BoundKeyNorms  # here, because hosts without a GPU need not have Triton

        return BoundKeyNorms(keys)
    return lambda page_index, length: reference(keys, page_index, length)


def reference(keys: Sequence[Tensor], page_index: Tensor, length: int) -> Tensor:
    """In torch: pages of one layer at a time."""
    norms = []
    for layer in keys:
        by_page_PHS = torch.linalg.vector_norm(layer.index_select(0, page_index), dim=-1, dtype=torch.float32)
        norms.append(by_page_PHS.transpose(0, 1).flatten(1)[:, :length])
    return torch.cat(norms)

"""Launches the norms' kernel: one for all layers that share a geometry."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared.kernels.key_norms.kernel import key_norms_kernel

_ELEMENTS = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_TILE_ELEMENTS = 4096


class BoundKeyNorms:
    """See norms.bind_key_norms. ValueError for an element type that has no norm here, or layers that are not alike."""

    def __init__(self, keys: Sequence[Tensor]) -> None:
        first = keys[0]
        if first.dtype not in _ELEMENTS:
            raise ValueError(f"keys must be one of {', '.join(map(str, _ELEMENTS))} to be scored, got {first.dtype}")
        for layer in keys:
            if (layer.shape, layer.stride(), layer.dtype) != (first.shape, first.stride(), first.dtype) or layer.stride(-1) != 1:
                raise ValueError(
                    f"layers must be alike with contiguous rows; got {tuple(layer.shape)} strides {layer.stride()} {layer.dtype} "
                    f"beside {tuple(first.shape)} strides {first.stride()} {first.dtype}"
                )
        _, self._heads, page_size, head_dim = first.shape
        self._layers = len(keys)
        self._keys = tuple(keys)  # whose addresses these are
        self._pointers = torch.tensor([layer.data_ptr() for layer in keys], dtype=torch.int64).to(first.device)
        block_d = triton.next_power_of_2(head_dim)
        self._block_t = max(1, _TILE_ELEMENTS // block_d)
        page, head, token, _ = first.stride()
        elements = [layer.data_ptr() // first.element_size() for layer in keys]
        self._constants = {
            "ELEMENT": _ELEMENTS[first.dtype],
            "ALIGNMENT": gcd(16, page, head, token, *elements) * first.element_size(),
            "PAGE_STRIDE": page,
            "HEAD_STRIDE": head,
            "TOKEN_STRIDE": token,
            "PAGE_SIZE": page_size,
            "HEAD_DIM": head_dim,
            "BLOCK_T": self._block_t,
            "BLOCK_D": block_d,
        }

    def __call__(self, page_index: Tensor, length: int) -> Tensor:
        out = torch.empty(self._layers * self._heads, length, dtype=torch.float32, device=page_index.device)
        grid = (triton.cdiv(length, self._block_t), self._layers * self._heads)
        key_norms_kernel[grid](self._pointers, page_index, out, self._heads, length, **self._constants)
        return out

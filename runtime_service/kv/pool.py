"""The device memory of one engine's KV cache: one tensor a layer, allocated once, at one address for life."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from runtime_service.kv.allocator import Fence
from shared.errors import MemoryExhausted
from shared.ids import PageId
from shared.kernels.key_norms.norms import KeyNorms, bind_key_norms
from shared.kernels.upload import upload
from shared.kv_spec import KVCacheSpec, LayerGroup

K, V = 0, 1
"""Index along the K/V axis."""


class StreamFence:
    """Behind everything launched so far on a CUDA device's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped in torch
        self._event.record(torch.cuda.current_stream(device))

    def passed(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]  # untyped in torch

    def wait(self) -> None:
        self._event.synchronize()


class KVPool:
    """`tensors[layer]` has shape `spec.pool_shape(group, num_pages)`, zeros at first. MemoryExhausted when it does not fit.

    Page 0 is the dump page; its content means nothing.
    """

    def __init__(self, spec: KVCacheSpec, num_pages: int, device: torch.device | str = "cpu") -> None:
        if num_pages < 2:
            raise ValueError(f"a pool needs the dump page and at least one more, got num_pages {num_pages}")
        self.spec = spec
        self.num_pages = num_pages
        self.device = torch.device(device)
        try:
            self.tensors: tuple[torch.Tensor, ...] = tuple(
                torch.zeros(spec.pool_shape(group, num_pages), dtype=getattr(torch, group.dtype.value), device=self.device)
                for _, group in spec.iter_layers()
            )
        except RuntimeError as error:  # torch has no narrower class for a CPU allocation that fails
            raise MemoryExhausted(
                f"a KV pool of {num_pages} pages takes {self.num_bytes} bytes on {self.device}; {error}. Use fewer pages"
            ) from error

    @classmethod
    def over(cls, spec: KVCacheSpec, tensors: Sequence[torch.Tensor]) -> KVPool:
        """A pool of tensors that somebody else allocated, one a layer in the shape above."""
        pool = cls.__new__(cls)
        pool.spec, pool.tensors, pool.device = spec, tuple(tensors), tensors[0].device
        pool.num_pages = tensors[0].shape[spec.layout.page_dim]
        return pool

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.spec.page_bytes

    def by_page(self, layer: int) -> torch.Tensor:
        """A layer's tensor as `[num_pages, 2, kv_heads, page_size, head_dim]` in either layout: a view, nothing moves."""
        tensor = self.tensors[layer]
        return tensor.movedim(self.spec.layout.page_dim, 0)

    def key_norms(self, pages: Sequence[PageId], length: int) -> list[torch.Tensor]:
        """Norms of the first `length` keys of the sequence on `pages`, as stored: float32 `[kv_heads, length]` for each layer that
        holds every entry, ascending, on the pool's device."""
        index = upload(torch.tensor(pages[: self.spec.pages_for(length)], dtype=torch.int64), self.device)
        by_layer: dict[int, torch.Tensor] = {}
        for group, norms in self._key_norms:
            norms_LHT = norms(index, length).view(len(group.layers), group.kv_heads, length)
            by_layer |= dict(zip(group.layers, norms_LHT, strict=True))
        return [by_layer[layer] for layer in sorted(by_layer)]

    def copy_page(self, source: PageId, target: PageId) -> None:
        """Copy one page's bytes in every layer. For many of them see kv/page_copies.py."""
        for layer in range(self.spec.num_layers):
            pages = self.by_page(layer)
            pages[target].copy_(pages[source])

    def fence(self) -> Fence | None:
        """Behind everything launched so far that touches the pool; None on a CPU, where what returns is done."""
        return StreamFence(self.device) if self.device.type == "cuda" else None

    def check_device(self) -> None:
        """Raises where the device carries out nothing more: after an illegal access, say, until the process ends."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @cached_property
    def _key_norms(self) -> list[tuple[LayerGroup, KeyNorms]]:
        full = [group for group in self.spec.groups if group.window is None]
        return [(group, bind_key_norms([self.by_page(layer)[:, K] for layer in group.layers])) for group in full]

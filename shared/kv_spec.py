"""The only place that knows how many bytes a KV entry takes and in which order a pool's axes lie.

Both layouts are one tensor a layer and are described by the same four strides (in elements):

    layout   tensor                                            a page is
    paged    [num_pages, 2, kv_heads, page_size, head_dim]     page_size tokens of one sequence
    linear   [2, num_pages, kv_heads, page_size, head_dim]     one slot: the whole row of page_size = max_len tokens

so allocator, movers, kernels and statistics see pages, a block table and strides, never a layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class DType(StrEnum):
    """Element types a KV pool may hold. Movers copy bytes, so every one of them moves; engines support fewer."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT8_E4M3 = "float8_e4m3fn"
    FLOAT8_E5M2 = "float8_e5m2"
    INT8 = "int8"

    @property
    def itemsize(self) -> int:
        return {"float32": 4, "float16": 2, "bfloat16": 2}.get(self.value, 1)


class Layout(StrEnum):
    """How the pool tensors of a cache lie; see the module's table."""

    PAGED = "paged"
    LINEAR = "linear"

    @property
    def page_dim(self) -> int:
        """Axis of the pool tensor that counts pages; the K/V axis is the other one of the first two."""
        return 0 if self is Layout.PAGED else 1

    @property
    def kv_dim(self) -> int:
        return 1 - self.page_dim


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share one geometry. `window` is the number of newest entries a query sees, itself included; None = all."""

    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    dtype: DType
    window: int | None = None

    def __post_init__(self) -> None:
        if not self.layers or list(self.layers) != sorted(set(self.layers)):
            raise ValueError(f"layers of a group must be ascending and unique, got {self.layers}")
        for name in ("kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1 or None, got {self.window}")

    @property
    def row_bytes(self) -> int:
        """Bytes of one head's K (or V) of one token."""
        return self.head_dim * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token over the group's heads and layers."""
        return 2 * self.kv_heads * self.row_bytes * len(self.layers)


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Geometry of the KV memory of one engine. `page_size` equals `max_len` for the linear layout.

    `max_len` bounds the *physical* length of one sequence (entries held at once), not its logical length.
    """

    groups: tuple[LayerGroup, ...]
    layout: Layout
    page_size: int
    max_len: int

    def __post_init__(self) -> None:
        layers = sorted(layer for group in self.groups for layer in group.layers)
        if layers != list(range(len(layers))) or not layers:
            raise ValueError(f"groups must cover layers 0..n once each, got {layers}")
        if self.page_size < 1 or self.max_len < 1:
            raise ValueError(f"page_size and max_len must be at least 1, got {self.page_size} and {self.max_len}")
        if self.layout is Layout.LINEAR and self.page_size != self.max_len:
            raise ValueError(f"linear layout: page_size must equal max_len {self.max_len}, got {self.page_size}")

    @property
    def num_layers(self) -> int:
        return sum(len(group.layers) for group in self.groups)

    @property
    def windows(self) -> tuple[int, ...]:
        """Of the groups that see only their newest entries, ascending."""
        return tuple(sorted({group.window for group in self.groups if group.window is not None}))

    @property
    def token_bytes(self) -> int:
        return sum(group.token_bytes for group in self.groups)

    @property
    def page_bytes(self) -> int:
        """Bytes one page takes over all layers."""
        return self.token_bytes * self.page_size

    @property
    def max_pages(self) -> int:
        """Width of a block table: pages of a sequence of `max_len` entries."""
        return self.pages_for(self.max_len)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` entries."""
        return -(-tokens // self.page_size)

    def group_of(self, layer: int) -> LayerGroup:
        """ValueError for a layer that is none of this cache's."""
        for group in self.groups:
            if layer in group.layers:
                return group
        raise ValueError(f"no layer {layer}; this cache has layers 0..{self.num_layers - 1}")

    def iter_layers(self) -> Iterator[tuple[int, LayerGroup]]:
        """(layer, group) in layer order."""
        for layer in range(self.num_layers):
            yield layer, self.group_of(layer)

    def pool_shape(self, group: LayerGroup, num_pages: int) -> tuple[int, int, int, int, int]:
        """Shape of one layer's pool tensor (see the module's table)."""
        outer = (num_pages, 2) if self.layout is Layout.PAGED else (2, num_pages)
        return (*outer, group.kv_heads, self.page_size, group.head_dim)

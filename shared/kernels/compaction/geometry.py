"""Where a cell's bytes lie: strides of a pool in bytes, and whether two pools could share one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shared.kv_spec import Layout


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape of one group's pools; strides in bytes. A cell is one token's place in a page: `page * page_size + slot`."""

    num_pages: int
    kv_heads: int
    page_size: int
    row_bytes: int
    page_stride: int
    kv_stride: int
    head_stride: int
    token_stride: int

    @property
    def num_cells(self) -> int:
        return self.num_pages * self.page_size


def byte_view(pool: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The pool as bytes `[pages, 2, kv_heads, page_size, row_bytes]`, whatever its layout and element type. Shares storage."""
    page_first = pool if layout is Layout.PAGED else pool.transpose(0, 1)
    return page_first.view(torch.uint8)


def geometry_of(view: torch.Tensor) -> Geometry:
    """Geometry of a byte view."""
    pages, _, kv_heads, page_size, row_bytes = view.shape
    page, kv, head, token, _ = view.stride()
    return Geometry(pages, kv_heads, page_size, row_bytes, page, kv, head, token)


def cells_overlap(view: torch.Tensor) -> bool:
    """Whether two indices of one view reach the same byte (a zero stride, say). Conservative: nested strides only."""
    extent = 1
    for stride, size in sorted(zip(view.stride(), view.shape, strict=True)):
        if size > 1 and stride < extent:
            return True
        extent += stride * (size - 1)
    return False


def may_alias(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two byte views could share a byte.

    Views far apart cannot. Nor can views of one stride pattern that interleave in one allocation, as layers of a
    `[pages, layers, ...]` pool do: along some axis both fit side by side into one stride.
    """
    delta = abs(a.data_ptr() - b.data_ptr())
    first, second = (a, b) if a.data_ptr() <= b.data_ptr() else (b, a)
    if first.numel() == 0 or second.numel() == 0 or delta >= _extent(first):
        return False
    if a.stride() != b.stride():
        return True
    for axis, stride in enumerate(a.stride()):
        inner = max(_extent(view, below=stride) for view in (a, b))
        if a.shape[axis] > 1 and inner <= delta % stride <= stride - inner:
            return False
    return True


def _extent(view: torch.Tensor, below: int | None = None) -> int:
    """Bytes from the first to one past the last byte that axes with a stride under `below` reach."""
    pairs = zip(view.stride(), view.shape, strict=True)
    return 1 + sum(stride * (size - 1) for stride, size in pairs if below is None or stride < below)

"""What a pool holds of a sequence, read one entry at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime_service.kv.page_table import PageTable
from runtime_service.kv.pool import K, KVPool
from shared.ids import Ordinal, PageId


def keys_of(pool: KVPool, layer: int, pages: Sequence[PageId], length: int) -> torch.Tensor:
    """The first `length` keys of the sequence on `pages`: `[kv_heads, length, head_dim]`, a copy."""
    table = PageTable(pages, pool.spec.page_size)
    cells = [table.locate(Ordinal(ordinal)) for ordinal in range(length)]
    return torch.stack([pool.by_page(layer)[page, K, :, offset] for page, offset in cells], dim=1)

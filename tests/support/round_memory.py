"""A pool whose every element is another number, and sequences on it: what rounds are tried on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from runtime_service.compaction.policy import KVView
from runtime_service.compaction.registry import POLICIES
from runtime_service.compaction.round import Compactor
from runtime_service.core.params import CompactionParams
from runtime_service.core.sequence import Sequence as KVSequence
from runtime_service.kv.allocator import PageAllocator
from runtime_service.kv.page_table import PageTable
from runtime_service.kv.pool import KVPool
from shared.ids import Ordinal, PageId
from shared.kernels.compaction.modes import RowMode
from shared.kv_spec import DType, KVCacheSpec, LayerGroup, Layout
from tests.support.serving import request

FULL = LayerGroup(layers=(0, 2), kv_heads=2, head_dim=4, dtype=DType.FLOAT32)
SLIDING = LayerGroup(layers=(1,), kv_heads=3, head_dim=2, dtype=DType.FLOAT32, window=3)
SPECS = {
    "paged": KVCacheSpec((FULL, SLIDING), Layout.PAGED, page_size=4, max_len=32),
    "linear": KVCacheSpec((FULL, SLIDING), Layout.LINEAR, page_size=32, max_len=32),
}
COMPACTION = CompactionParams("chosen", budget=5, interval=6, sinks=0)
both_layouts = pytest.mark.parametrize("layout", SPECS)


class Chosen:
    """Keeps the ordinals a test names; `by_row` where heads have rows of their own."""

    reads_keys = False

    def __init__(self) -> None:
        self.kept: list[int] = [0, 1, 5, 9, 10]
        self.rows = RowMode.UNION
        self.by_row: list[list[int]] = []

    def score(self, view: KVView) -> torch.Tensor:
        chosen = [self.kept] if self.rows is RowMode.UNION else self.by_row
        return torch.from_numpy(np.stack([np.isin(np.arange(view.length), kept) for kept in chosen])).float()


class Memory:
    """A pool whose every element is another number, and sequences on it."""

    def __init__(
        self,
        layout: str,
        num_pages: int = 12,
        groups: tuple[LayerGroup, ...] = (FULL, SLIDING),
        compaction: CompactionParams = COMPACTION,
    ) -> None:
        self.compaction = compaction
        self.spec = replace(SPECS[layout], groups=groups)
        self.pool = KVPool(self.spec, num_pages)
        for layer, tensor in enumerate(self.pool.tensors):
            tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) + 100_000 * (layer + 1))
        self.allocator = PageAllocator(num_pages)
        self.policy = Chosen()
        self.compactor = Compactor(self.pool, self.allocator, {"chosen": self.policy, **POLICIES}, max_sequences=3)

    def sequence(self, entries: int, *, pages: Sequence[PageId] | None = None) -> KVSequence:
        made = KVSequence(request([1] * entries, 50, compaction=self.compaction), 0, 0)
        made.start()
        made.hold(pages or self.allocator.try_allocate(self.spec.pages_for(entries)) or [])
        made.advance(entries)
        made.append(1)
        return made

    def rows(self, sequence: KVSequence, layer: int, head: int | None = None) -> list[list[float]]:
        """K and V of every entry, of all heads or one, in ordinal order."""
        table, pages = PageTable(sequence.pages, self.spec.page_size), self.pool.by_page(layer)
        cells = [table.locate(Ordinal(o)) for o in range(sequence.physical_len)]
        heads = slice(None) if head is None else slice(head, head + 1)
        return [pages[page, :, heads, offset].flatten().tolist() for page, offset in cells]

    def snapshot(self) -> list[torch.Tensor]:
        return [self.pool.by_page(layer).clone() for layer in range(self.spec.num_layers)]

"""A round over offsets past 2^31 elements and 2^32 bytes: few cells, in pages a GiB apart, of memory mostly never touched."""

from __future__ import annotations

import numpy as np
import torch

from shared.kernels.compaction.inputs import RoundInputs
from shared.kernels.compaction.layout import CacheLayout, PoolGroup
from shared.kernels.compaction.modes import Mode, RowMode
from shared.kernels.compaction.movers import Mover
from shared.kernels.compaction.params import build_compaction_params, compact
from shared.kv_spec import Layout
from tests.support.compaction.catalogue import union

TABLE = (4, 1, 3)
PAGE_SIZE = 2


def differing_far_cells(mover: Mover, device: torch.device, mode: Mode = Mode.ORDERED) -> int:
    """Cells that are wrong after a round that keeps ordinals 1, 4 and 5 of 6; every cell of every page is looked at."""
    pool = torch.empty(5 << 30, dtype=torch.int8, device=device).as_strided((5, 2, 1, PAGE_SIZE, 4), (1 << 30, 1 << 29, 8, 4, 1))
    for page in range(5):
        pool[page] = torch.arange(16, device=device).view(2, 1, PAGE_SIZE, 4) + 16 * page
    before = pool.clone()
    table = torch.tensor([TABLE], dtype=torch.int32, device=device)
    layout = CacheLayout(Layout.PAGED, (PoolGroup((0,), (pool,), table, mode=mode),))
    inputs = RoundInputs.allocate(layout, row_mode=RowMode.UNION, keep_capacity=4)
    compact(build_compaction_params(layout, inputs, mover=mover), inputs.stage([union([1, 4, 5], valid_len=6)]))
    order = [1, 4, 5] if mode is Mode.ORDERED else [4, 1, 5]  # holes 0 and 2 take 4 and 5
    expected = before.clone()
    for ordinal, source in enumerate(order):
        (to_page, to_slot), (page, slot) = np.divmod(ordinal, PAGE_SIZE), np.divmod(source, PAGE_SIZE)
        expected[TABLE[to_page], :, :, to_slot] = before[TABLE[page], :, :, slot]
    return int((pool != expected).flatten(3).any(-1).sum())

"""What a round should leave behind, worked out of place with indexing: for pools too large for the reference's loop."""

from __future__ import annotations

import numpy as np
import torch

from shared.kernels.compaction.geometry import byte_view
from shared.kernels.compaction.modes import Mode, RowMode
from shared.kernels.compaction.moves import Moves, hole_filling_moves, ordered_moves
from tests.support.compaction.case import Rig


def expected_after(rig: Rig) -> list[torch.Tensor]:
    """The bytes of every allocation after the rig's round, which must not have run yet. Full-attention groups, no scrubbing."""
    after = Rig(rig.case, rig.device)
    for group, target, source in zip(rig.case.groups, after.layout.groups, rig.layout.groups, strict=True):
        for layer in range(len(group.layers)):
            new, old = byte_view(target.pools[layer], rig.case.layout), byte_view(source.pools[layer], rig.case.layout)
            for request, part in enumerate(rig.case.requests):
                for head in range(group.kv_heads):
                    row = {RowMode.UNION: 0, RowMode.PER_HEAD: head, RowMode.PER_LAYER_HEAD: layer * group.kv_heads + head}
                    build = ordered_moves if group.mode is Mode.ORDERED else hole_filling_moves
                    moves = build(part.kept[row[rig.case.row_mode]], part.base, part.valid_len, part.tail)
                    _copy(new, old, moves, group.table[request], head, rig)
    return after.storages


def _copy(new: torch.Tensor, old: torch.Tensor, moves: Moves, table: np.ndarray, head: int, rig: Rig) -> None:
    def place(ordinals: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        pages, slots = table[ordinals // rig.case.page_size], ordinals % rig.case.page_size
        return torch.from_numpy(pages.astype(np.int64)).to(rig.device), torch.from_numpy(slots.astype(np.int64)).to(rig.device)

    (from_page, from_slot), (to_page, to_slot) = place(moves.src), place(moves.dst)
    new[to_page, :, head, to_slot] = old[from_page, :, head, from_slot]

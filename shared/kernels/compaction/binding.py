"""Groups as movers see them: pools as bytes, and which decision row each head follows. The layouts end here."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shared.kernels.compaction.geometry import Geometry, byte_view, geometry_of
from shared.kernels.compaction.inputs import RoundInputs
from shared.kernels.compaction.layout import CacheLayout, Family
from shared.kernels.compaction.modes import Mode, RowMode


@dataclass(frozen=True, slots=True, eq=False)
class BoundGroup:
    """One launch's worth of layers.

    `pools` are byte views `[pages, 2, kv_heads, page_size, row_bytes]`. Head h of layer l follows decision row
    `first_row[l] + h * head_step`; a masked window (`window`) follows none. `list_rows` is how many different lists of moves a
    request has: `list_row(l, h) = l * list_layer_step + h * head_step`.
    """

    pools: tuple[torch.Tensor, ...]
    geometry: Geometry
    block_table: torch.Tensor
    tail: torch.Tensor
    first_row: tuple[int, ...]
    head_step: int
    list_layer_step: int
    window: int | None
    mode: Mode
    scrub: bool
    move_capacity: int

    @property
    def list_rows(self) -> int:
        if self.list_layer_step:
            return self.list_layer_step * len(self.pools)
        return self.geometry.kv_heads if self.head_step else 1


def bind_groups(layout: CacheLayout, inputs: RoundInputs, draft: CacheLayout | None, scrub: bool) -> tuple[BoundGroup, ...]:
    """Every group of the target, then of the draft, that a round moves anything in."""
    groups = _bind_cache(layout, inputs, inputs.tail, inputs.row_mode, scrub)
    if draft is not None:
        groups += _bind_cache(draft, inputs, inputs.draft_tail, RowMode.UNION, scrub)
    return tuple(groups)


def _bind_cache(cache: CacheLayout, inputs: RoundInputs, tail: torch.Tensor, row_mode: RowMode, scrub: bool) -> list[BoundGroup]:
    row_of_layer: dict[int, int] = {}
    next_row = 0
    for layer, heads in cache.full_layers():
        row_of_layer[layer] = next_row
        next_row += heads if row_mode is RowMode.PER_LAYER_HEAD else 0
    bound = []
    for group in cache.groups:
        if group.family is Family.WINDOW_SIZED:
            continue
        views = tuple(byte_view(pool, cache.layout) for pool in group.pools)
        geometry = geometry_of(views[0])
        decided = group.family is Family.FULL and row_mode is not RowMode.UNION
        moved = (group.window or inputs.keep_capacity) + inputs.tail_capacity
        bound.append(
            BoundGroup(
                pools=views,
                geometry=geometry,
                block_table=group.block_table,
                tail=tail,
                first_row=tuple(row_of_layer.get(layer, 0) for layer in group.layers),
                head_step=int(decided),
                list_layer_step=geometry.kv_heads if decided and row_mode is RowMode.PER_LAYER_HEAD else 0,
                window=group.window,
                mode=group.mode,
                scrub=scrub,
                move_capacity=moved + (geometry.page_size - 1 if scrub else 0),
            )
        )
    return bound

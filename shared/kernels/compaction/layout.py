"""Which pools a round moves and how: layers grouped by geometry, each group with its block table, family and mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from shared.kernels.compaction.modes import Mode
from shared.kv_spec import KVCacheSpec, Layout


class Family(StrEnum):
    """What a group's layers attend over, and so what a round does to them.

    full            every entry: moved by the decision
    masked_window   stored at full length, masked by physical order to the newest `window` entries: those slide so that they end
                    where the full layers end; the decision is not consulted and cells before them are stale
    window_sized    stores only its window (older pages unmapped): nothing moves
    """

    FULL = "full"
    MASKED_WINDOW = "masked_window"
    WINDOW_SIZED = "window_sized"


@dataclass(frozen=True, slots=True)
class PoolGroup:
    """Layers of one geometry.

    `layers` are model layer indices, ascending, one for each tensor of `pools` (see `shared.kv_spec` for its shape; strides are
    free as long as head_dim is contiguous and cells do not overlap). `block_table` is int32 `[batch, max_pages]`, inner stride 1:
    row r belongs to request r of a round, a negative entry is unmapped. Rounds read it in place. `window` goes with
    `masked_window`.
    """

    layers: tuple[int, ...]
    pools: tuple[torch.Tensor, ...]
    block_table: torch.Tensor
    family: Family = Family.FULL
    window: int | None = None
    mode: Mode = Mode.ORDERED


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The pools of one cache (a target's or a draft's)."""

    layout: Layout
    groups: tuple[PoolGroup, ...]

    @classmethod
    def from_spec(
        cls, spec: KVCacheSpec, pools: Sequence[torch.Tensor], block_table: torch.Tensor, mode: Mode = Mode.ORDERED
    ) -> CacheLayout:
        """Layout of a cache whose layers all share one block table; `pools` in layer order, one tensor a layer.

        `mode` is for the full-attention groups. Groups with a window are stored at full length and always ordered.
        """
        if len(pools) != spec.num_layers:
            raise ValueError(f"pools: expected one tensor for each of {spec.num_layers} layers, got {len(pools)}")
        groups = (
            PoolGroup(
                layers=group.layers,
                pools=tuple(pools[layer] for layer in group.layers),
                block_table=block_table,
                family=Family.FULL if group.window is None else Family.MASKED_WINDOW,
                window=group.window,
                mode=mode if group.window is None else Mode.ORDERED,
            )
            for group in spec.groups
        )
        return cls(layout=spec.layout, groups=tuple(groups))

    def full_layers(self) -> tuple[tuple[int, int], ...]:
        """(layer, kv_heads) of the layers a decision speaks of, ascending: the order of per-layer decision rows."""
        return tuple(
            sorted(
                (layer, pool.shape[2])
                for group in self.groups
                if group.family is Family.FULL
                for layer, pool in zip(group.layers, group.pools, strict=True)
            )
        )

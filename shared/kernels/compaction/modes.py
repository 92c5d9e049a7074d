"""What a caller chooses about a round. No tensors here: requests, plans and movers all speak of it."""

from __future__ import annotations

from enum import StrEnum


class Mode(StrEnum):
    """How survivors close the gaps that evicted entries leave.

    ordered        the survivors keep their order: move i goes to `base + i`
    hole_filling   survivors beyond the new length fill the holes below it; fewer moves, another order. Exact where attention
                   does not look at the order of cells, which a window masked by physical order does
    """

    ORDERED = "ordered"
    HOLE_FILLING = "hole_filling"


class RowMode(StrEnum):
    """Who shares a row of kept ordinals. Every row of one request keeps the same count.

    union            one row: every layer and head keeps the same entries
    per_head         kv_heads rows, shared by the layers
    per_layer_head   one row for each head of each full-attention layer, layers ascending, heads inside a layer
    """

    UNION = "union"
    PER_HEAD = "per_head"
    PER_LAYER_HEAD = "per_layer_head"

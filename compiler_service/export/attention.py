"""The attention function our exports use instead of the model's own.

transformers calls it with rotated queries and keys. It writes the new rows into the layer's caches with one index_put each,
from `write_start` on, and reads the caches through `quire::attend`, which masks by the same `write_start`: write and mask
cannot disagree, whatever the model does with masks of its own (it is given none).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from shared.errors import UnsupportedModel
from shared.kv_spec import KVCacheSpec

ATTENTION = "quire"
"""Name under which the function is registered (`config._attn_implementation`)."""

_WITHOUT_EFFECT = frozenset({"dropout", "position_ids", "use_cache", "cache", "is_causal"})
"""Keywords models pass that change nothing here: dropout is off in eval mode, positions are in the rotated keys already."""


@dataclass(slots=True)
class StepCaches:
    """The caches of one step, `[batch, kv_heads, max_len, head_dim]` a layer, and where the new rows go.

    `write_start` is int32 `[batch]`. `spec` states the window every layer must ask for.
    """

    k: Sequence[Tensor]
    v: Sequence[Tensor]
    write_start: Tensor
    query_len: int
    spec: KVCacheSpec
    rows: Tensor = field(init=False)
    slots: Tensor = field(init=False)

    def __post_init__(self) -> None:
        device = self.write_start.device
        self.rows = torch.arange(self.write_start.shape[0], device=device)[:, None]
        self.slots = self.write_start[:, None] + torch.arange(self.query_len, device=device, dtype=torch.int32)

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new rows `[batch, kv_heads, query_len, head_dim]`; return the layer's caches."""
        k, v = self.k[layer], self.v[layer]
        # The indexed axes are not neighbours, so index_put wants them first: [batch, query_len, kv_heads, head_dim].
        k[self.rows, :, self.slots] = key.transpose(1, 2)
        v[self.rows, :, self.slots] = value.transpose(1, 2)
        return k, v


def cached_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    step: StepCaches,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """`query` is `[batch, heads, query_len, head_dim]`; returns `[batch, query_len, heads, head_dim]` and no weights.

    UnsupportedModel when the model asks for something this function would ignore.
    """
    layer = module.layer_idx
    assert isinstance(layer, int)
    if attention_mask is not None:
        raise UnsupportedModel(f"layer {layer} built a mask of its own; only causal and sliding-window decoders are lowered")
    if unknown := sorted(name for name, given in others.items() if name not in _WITHOUT_EFFECT and given is not None):
        raise UnsupportedModel(f"layer {layer} passes {', '.join(unknown)} to its attention, which quire::attend does not know")
    window = step.spec.group_of(layer).window
    # A window that reaches over the whole cache sees everything: the spec lists such a layer as one without a window.
    if sliding_window is not None and sliding_window >= step.spec.max_len:
        sliding_window = None
    if sliding_window != window:
        raise UnsupportedModel(f"layer {layer} attends within a window of {sliding_window}, its configuration says {window}")
    k_cache, v_cache = step.write(layer, key, value)
    out = torch.ops.quire.attend(query, k_cache, v_cache, step.write_start, scaling, window, softcap, s_aux)
    return out.transpose(1, 2).contiguous(), None


def register_attention() -> None:
    """Make `ATTENTION` known to transformers; calling it again changes nothing."""
    AttentionInterface.register(ATTENTION, cached_attention)

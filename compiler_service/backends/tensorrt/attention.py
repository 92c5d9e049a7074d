"""`quire::attend` as TensorRT layers: queries folded onto their K/V heads, one bool mask for all layers of a window.

Folding (`[B, N*G, n, D]` -> `[B, N, G*n, D]`) lets each K/V head be read once for its group of query heads. Row `g*n + i` of the
fold is query i, so the mask, `[B, 1, G*n, S]`, says of it what it says of query i: cells `j <= start + i`, and of those only
the newest `window`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import tensorrt as trt

from compiler_service.backends.tensorrt.layers import ITensor, Layers

_HIDDEN = -3.0e38
"""A masked score: its exponential is 0 whatever the row's maximum. Finite, because inf - inf is no number."""


@dataclass(slots=True)
class Masks:
    """The masks of one network. `tokens` is its `[B, n]` input, `start` int32 `[B]`; `max_len` cells a row."""

    layers: Layers
    tokens: ITensor
    start: ITensor
    max_len: int
    _made: dict[tuple[int, int | None], ITensor] = field(default_factory=dict)

    def visible(self, group: int, window: int | None) -> ITensor:
        """bool `[B, 1, group * n, S]`: the cells each folded query sees."""
        key = (group, window)
        if key not in self._made:
            self._made[key] = self._make(group, window)
        return self._made[key]

    def _make(self, group: int, window: int | None) -> ITensor:
        layers = self.layers
        cells = np.arange(self.max_len, dtype=np.int32)
        own = layers.elementwise("SUM", layers.reshape(self.start, (-1, 1, 1, 1)), self._folded_queries(group, cells))
        row = cells.reshape(1, 1, 1, -1)
        visible = layers.unary("NOT", layers.elementwise("GREATER", layers.constant(row), own))
        if window is None:
            return visible
        recent = layers.elementwise("GREATER", layers.constant(row + np.int32(window)), own)
        return layers.elementwise("AND", visible, recent)

    def _folded_queries(self, group: int, cells: np.ndarray[tuple[int], np.dtype[np.int32]]) -> ITensor:
        """int32 `[1, 1, group * n, 1]`: 0..n, `group` times over. The first n cells, read with a stride of zero along the group."""
        layers = self.layers
        slots = layers.constant(cells.reshape(1, -1))
        count = layers.axis_size(self.tokens, 1)
        size = layers.concat([layers.constant(np.array([group], dtype=np.int64)), count])
        repeated = layers.network.add_slice(slots, (0, 0), (1, 1), (0, 1))
        repeated.set_input(2, size)
        return layers.reshape(layers.output(repeated, "queries"), (1, 1, -1, 1))


def attend(
    layers: Layers,
    masks: Masks,
    q: ITensor,
    k: ITensor,
    v: ITensor,
    heads: tuple[int, int],
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: ITensor | None,
) -> ITensor:
    """Attention of `q [B, Hq, n, D]` over the caches `[B, Hkv, S, D]` as quire::attend defines it; `heads` is (Hq, Hkv)."""
    query_heads, kv_heads = heads
    group = query_heads // kv_heads
    head_dim = k.shape[3]
    visible = masks.visible(group, window)
    folded = layers.reshape(q, (0, kv_heads, -1, head_dim))
    scaled = layers.elementwise("PROD", folded, layers.constant(np.full((1, 1, 1, 1), scale, np.float32), q.dtype))
    if softcap is None and sinks is None:
        out = _native(layers, scaled, k, v, visible)
    else:
        out = _decomposed(layers, scaled, k, v, visible, group, softcap, sinks)
    return layers.reshape(out, (0, query_heads, -1, head_dim))


def _native(layers: Layers, q: ITensor, k: ITensor, v: ITensor, visible: ITensor) -> ITensor:
    softmax, no_mask_of_its_own = trt.AttentionNormalizationOp.SOFTMAX, trt.CausalMaskKind.NONE
    layer = layers.network.add_attention_v2(q, k, v, softmax, no_mask_of_its_own)
    out = layers.output(layer, "attention")
    layer.mask = visible
    layer.decomposable = True  # else the builder refuses targets that have no fused kernel
    return out


def _decomposed(
    layers: Layers,
    q: ITensor,
    k: ITensor,
    v: ITensor,
    visible: ITensor,
    group: int,
    softcap: float | None,
    sinks: ITensor | None,
) -> ITensor:
    """In float32, `[B, Hkv, G*n, D]`, since the attention layer has neither a cap nor sinks."""
    dtype, kv_heads = q.dtype, k.shape[1]
    q, k, v = (layers.cast(tensor, trt.float32) for tensor in (q, k, v))
    scores = layers.matmul(q, k, transpose_right=True)
    if softcap is not None:
        cap = layers.constant(np.full((1, 1, 1, 1), softcap, np.float32))
        scores = layers.elementwise("PROD", layers.tanh(layers.elementwise("DIV", scores, cap)), cap)
    scores = layers.select(visible, scores, layers.constant(np.full((1, 1, 1, 1), _HIDDEN, np.float32)))
    # By group, [B, Hkv, G, n, S], each query head's sink broadcasts.
    scores = layers.reshape(scores, (0, kv_heads, group, -1, k.shape[2]))
    weights = layers.reshape(_softmax(layers, scores, kv_heads, group, sinks), (0, kv_heads, -1, k.shape[2]))
    return layers.cast(layers.matmul(weights, v), dtype)


def _softmax(layers: Layers, scores: ITensor, kv_heads: int, group: int, sinks: ITensor | None) -> ITensor:
    """Over the last axis of `scores [B, Hkv, G, n, S]`; a sink is one more score that no value belongs to."""
    highest = layers.reduce("MAX", scores, 4)
    if sinks is not None:
        sinks = layers.reshape(layers.cast(sinks, trt.float32), (1, kv_heads, group, 1, 1))
        highest = layers.elementwise("MAX", highest, sinks)
    weights = layers.unary("EXP", layers.elementwise("SUB", scores, highest))
    total = layers.reduce("SUM", weights, 4)
    if sinks is not None:
        total = layers.elementwise("SUM", total, layers.unary("EXP", layers.elementwise("SUB", sinks, highest)))
    return layers.elementwise("DIV", weights, total)


def masked_attention(
    layers: Layers,
    q: ITensor,
    k: ITensor,
    v: ITensor,
    mask: ITensor,
    heads: tuple[int, int],
    scale: float,
    value_dim: int,
) -> ITensor:
    """Attention of `q [B, Hq, n, D]` over `k [B, Hkv, S, D]` and `v [B, Hkv, S, value_dim]` in float32, whatever the sizes.

    `mask [B, 1 or Hq, n, S]` is true for the cells seen, or is added to the scores; `heads` is (Hq, Hkv).
    """
    query_heads, kv_heads = heads
    group, cells, dtype = query_heads // kv_heads, k.shape[2], q.dtype
    q, k, v = (layers.cast(tensor, trt.float32) for tensor in (q, k, v))
    folded = layers.reshape(q, (0, kv_heads, -1, k.shape[3]))
    scaled = layers.elementwise("PROD", folded, layers.constant(np.full((1, 1, 1, 1), scale, np.float32)))
    scores = layers.reshape(layers.matmul(scaled, k, transpose_right=True), (0, kv_heads, group, -1, cells))
    by_group = layers.reshape(mask, (0, 1, 1, -1, cells) if mask.shape[1] == 1 else (0, kv_heads, group, -1, cells))
    if mask.dtype == trt.bool:
        scores = layers.select(by_group, scores, layers.constant(np.full((1, 1, 1, 1, 1), _HIDDEN, np.float32)))
    else:
        scores = layers.elementwise("SUM", scores, layers.cast(by_group, trt.float32))
    weights = layers.reshape(_softmax(layers, scores, kv_heads, group, None), (0, kv_heads, -1, cells))
    return layers.cast(layers.reshape(layers.matmul(weights, v), (0, query_heads, -1, value_dim)), dtype)

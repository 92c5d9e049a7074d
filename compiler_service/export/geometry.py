"""A decoder's configuration read as the geometry of its KV cache."""

from __future__ import annotations

from transformers import PreTrainedConfig

from shared.kv_spec import DType, KVCacheSpec, LayerGroup, Layout


def layer_windows(config: PreTrainedConfig) -> list[int | None]:
    """Sliding window of each layer, counted with the query itself; None = the layer sees everything."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]


def cache_spec(config: PreTrainedConfig, dtype: DType, layout: Layout, page_size: int, max_len: int) -> KVCacheSpec:
    """The cache a decoder of this (ingested, hence checked) configuration needs: at most `max_len` entries a sequence.

    A window of at least `max_len` is no window: whatever a sequence can hold lies inside it.
    """
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers_of: dict[int | None, list[int]] = {}
    for layer, window in enumerate(layer_windows(config)):
        layers_of.setdefault(window if window is not None and window < max_len else None, []).append(layer)
    groups = tuple(
        LayerGroup(layers=tuple(layers), kv_heads=config.num_key_value_heads, head_dim=head_dim, dtype=dtype, window=window)
        for window, layers in layers_of.items()
    )
    return KVCacheSpec(groups, layout, page_size, max_len)

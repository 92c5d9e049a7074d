"""A decoder's configuration read as the geometry of its KV cache."""

from __future__ import annotations

from transformers import PretrainedConfig

from shared.errors import UnsupportedModel
from shared.kv_spec import DType, KVCacheSpec, LayerGroup, Layout

MODEL_TYPES = frozenset({"llama", "qwen3", "gemma3_text"})
"""`model_type` of the configurations this compiler exports."""

_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotations whose frequencies are constants; the others look at the length of the sequence."""


def check_supported(config: PretrainedConfig) -> None:
    """UnsupportedModel naming the setting this compiler cannot lower."""
    if config.model_type not in MODEL_TYPES:
        raise UnsupportedModel(f"model_type must be one of {', '.join(sorted(MODEL_TYPES))}; got {config.model_type!r}")
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModel("use_bidirectional_attention is set: only causal decoders are lowered")
    for rope_type in _rope_types(config):
        if rope_type not in _ROPE_TYPES:
            raise UnsupportedModel(f"rope_type must be one of {', '.join(sorted(_ROPE_TYPES))}; got {rope_type!r}")


def _rope_types(config: PretrainedConfig) -> list[str]:
    parameters = config.rope_parameters
    # One rotation for all layers, or one for each kind of layer.
    nested = [entry for entry in parameters.values() if isinstance(entry, dict)] or [parameters]
    return [entry.get("rope_type", "default") for entry in nested]


def layer_windows(config: PretrainedConfig) -> list[int | None]:
    """The sliding window of each layer, itself included; None = the layer sees everything."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    windows: list[int | None] = []
    for layer, kind in enumerate(kinds):
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModel(f"layer {layer} is of kind {kind!r}; full_attention and sliding_attention are lowered")
        windows.append(config.sliding_window if kind == "sliding_attention" else None)
    return windows


def cache_spec(config: PretrainedConfig, dtype: DType, layout: Layout, page_size: int, max_len: int) -> KVCacheSpec:
    """The cache a decoder of this configuration needs. `page_size` is ignored by the linear layout, whose page is a row.

    A window of at least `max_len` is no window (every row a sequence can hold is inside it).
    """
    check_supported(config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layers_of: dict[int | None, list[int]] = {}
    for layer, window in enumerate(layer_windows(config)):
        layers_of.setdefault(window if window is not None and window < max_len else None, []).append(layer)
    groups = tuple(
        LayerGroup(layers=tuple(layers), kv_heads=config.num_key_value_heads, head_dim=head_dim, dtype=dtype, window=window)
        for window, layers in layers_of.items()
    )
    return KVCacheSpec(groups, layout, page_size if layout is Layout.PAGED else max_len, max_len)

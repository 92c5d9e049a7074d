"""From the fields of a config to a checked `transformers` config of one family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from compiler_service.ingest.families import BY_ARCHITECTURE, SUPPORTED, Family
from shared.errors import SourceInvalid, UnsafeSource, UnsupportedModel

CAPS = {
    "vocab_size": 1 << 20,
    "hidden_size": 1 << 16,
    "intermediate_size": 1 << 18,
    "num_hidden_layers": 512,
    "num_attention_heads": 1024,
    "num_key_value_heads": 1024,
    "head_dim": 1024,
    "max_position_embeddings": 1 << 24,
}
"""Largest values taken: above any published decoder, and small enough that describing the model costs nothing."""
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary tables that depend on the position alone; `dynamic` and `longrope` change with the length so far."""
_LAYER_KINDS = frozenset({"full_attention", "sliding_attention"})


def family_of(fields: Mapping[str, Any]) -> Family:
    """The family a checkpoint's config.json declares. UnsafeSource for remote code, UnsupportedModel for any other architecture."""
    if "auto_map" in fields:
        raise UnsafeSource("config.json asks for code from outside (auto_map); remote code is never run")
    declared = fields.get("architectures")
    if isinstance(declared, list) and len(declared) == 1 and isinstance(declared[0], str) and declared[0] in BY_ARCHITECTURE:
        return BY_ARCHITECTURE[declared[0]]
    raise UnsupportedModel(f"supported architectures are {SUPPORTED}; config.json declares {str(declared)[:200]}")


def build_config(family: Family, fields: Mapping[str, Any]) -> PreTrainedConfig:
    """A config of `family`. SourceInvalid names a field of the wrong type or size; UnsupportedModel what cannot be lowered."""
    if fields.get("quantization_config") is not None:
        raise UnsupportedModel("the checkpoint's weights are quantised; name one with float weights, or a GGUF file")
    for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"):
        if name not in fields:
            raise SourceInvalid(f"the config lacks {name}")
    check_sizes(fields)
    try:
        config = family.config(fields)
    except (StrictDataclassError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        raise SourceInvalid(f"the config does not describe a {family.architecture}: {error}") from error
    _check_activation(config)
    _check_heads(config)
    _check_layers(config)
    _check_rope(config)
    return config


def check_sizes(fields: Mapping[str, Any]) -> None:
    """SourceInvalid names a size that is none, or above its cap; one that is not there is not asked for."""
    for name, cap in CAPS.items():
        value = fields.get(name)
        if value is not None and not (type(value) is int and 1 <= value <= cap):
            raise SourceInvalid(f"{name} must be an integer from 1 to {cap}; the config has {str(value)[:80]!r}")


def head_dim(config: PreTrainedConfig) -> int:
    """Elements of one attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _check_activation(config: PreTrainedConfig) -> None:
    name = getattr(config, "hidden_activation", None) or config.hidden_act
    if name not in ACT2FN:
        raise SourceInvalid(f"hidden_act must be an activation transformers knows; the config has {str(name)[:40]!r}")


def _check_heads(config: PreTrainedConfig) -> None:
    queries, keys = config.num_attention_heads, config.num_key_value_heads
    if queries % keys:
        raise SourceInvalid(f"num_attention_heads {queries} must be a multiple of num_key_value_heads {keys}")


def _check_layers(config: PreTrainedConfig) -> None:
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return
    if len(kinds) != config.num_hidden_layers or not set(kinds) <= _LAYER_KINDS:
        raise SourceInvalid(
            f"layer_types must name {config.num_hidden_layers} layers as {sorted(_LAYER_KINDS)}; got {str(kinds)[:200]}"
        )
    if "sliding_attention" in kinds and not (type(config.sliding_window) is int and config.sliding_window >= 1):
        raise SourceInvalid(f"sliding layers need a sliding_window of at least 1; the config has {config.sliding_window!r}")
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModel("use_bidirectional_attention: only causal decoders are lowered")


def _check_rope(config: PreTrainedConfig) -> None:
    rope = config.rope_parameters
    tables = list(rope.values()) if all(isinstance(value, dict) for value in rope.values()) else [rope]
    for table in tables:
        kind = table.get("rope_type", "default")
        if kind not in _FIXED_ROPE:
            raise UnsupportedModel(f"rope type must be one of {', '.join(_FIXED_ROPE)}; the config has {str(kind)[:40]!r}")
        if table.get("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedModel(f"partial rotary embeddings are not lowered; the config has {table['partial_rotary_factor']!r}")

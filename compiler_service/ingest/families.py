"""The decoder families this compiler lowers, and what tells one from the other in each kind of source.

A family is a row of `FAMILIES`. What the rest of the compiler asks of one: decoder-only, rotary positions that do not depend on
the length so far, softmax attention over one K and V cache a layer, causal and optionally within a window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Gemma3ForCausalLM, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen3ForCausalLM

_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture. `block` maps a GGUF tensor of a layer (`blk.N.` and `.weight` dropped) to the module that owns it.

    `restore` undoes what the GGUF converter did to a tensor: (stored values, canonical name, config) -> the checkpoint's values.
    """

    model_class: type[PreTrainedModel]
    gguf_architecture: str
    block: Mapping[str, str]
    restore: Callable[[torch.Tensor, str, PreTrainedConfig], torch.Tensor]

    @property
    def architecture(self) -> str:
        """The name config.json gives it."""
        return self.model_class.__name__

    def config(self, fields: Mapping[str, Any]) -> PreTrainedConfig:
        """A config of this family from its fields, as `transformers` reads them."""
        return self.model_class.config_class.from_dict({**fields, "architectures": [self.architecture]})


def _as_stored(values: torch.Tensor, name: str, config: PreTrainedConfig) -> torch.Tensor:
    return values


def _unpermute_heads(values: torch.Tensor, name: str, config: PreTrainedConfig) -> torch.Tensor:
    """Llama files interleave the two halves of each rotary head: rows (0, d/2, 1, d/2+1, ...) of a head; back to 0, 1, 2, ..."""
    if name.endswith("q_proj.weight"):
        heads = config.num_attention_heads
    elif name.endswith("k_proj.weight"):
        heads = config.num_key_value_heads
    else:
        return values
    rows, columns = values.shape
    return values.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _norms_minus_one(values: torch.Tensor, name: str, config: PreTrainedConfig) -> torch.Tensor:
    """Gemma's norms scale by 1 + weight; the file holds the sum."""
    return values - 1 if name.endswith("norm.weight") else values


FAMILIES = (
    Family(
        model_class=LlamaForCausalLM,
        gguf_architecture="llama",
        block=_BLOCK | {"ffn_norm": "post_attention_layernorm"},
        restore=_unpermute_heads,
    ),
    Family(
        model_class=Qwen3ForCausalLM,
        gguf_architecture="qwen3",
        block=_BLOCK | _QK_NORM | {"ffn_norm": "post_attention_layernorm"},
        restore=_as_stored,
    ),
    Family(
        model_class=Gemma3ForCausalLM,
        gguf_architecture="gemma3",
        block=_BLOCK
        | _QK_NORM
        | {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        restore=_norms_minus_one,
    ),
)

BY_ARCHITECTURE = {family.architecture: family for family in FAMILIES}
SUPPORTED = ", ".join(BY_ARCHITECTURE)

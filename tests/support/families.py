"""Tiny random decoders of `transformers`' families, for the table of what becomes of each (`make families`)."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "word_embed_proj_dim": 64,
    "intermediate_size": 96,
    "n_inner": 96,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 16,
    "sliding_window": 8,
    "max_position_embeddings": 512,
    "n_positions": 512,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 97,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Sizes by the names the families' configurations have for them; each takes those it knows."""

_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 8,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "gemma4_text": {},
    "phi": {},
    "phi3": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "smollm3": {},
    "gpt2": {},
    "gpt_neox": {},
    "gptj": {},
    "gpt_bigcode": {},
    "codegen": {},
    "bloom": {},
    "falcon": {},
    "opt": {},
    "cohere": {},
    "cohere2": {},
    "granite": {},
    "starcoder2": {},
    "glm": {},
    "glm4": {},
    "stablelm": {},
    "persimmon": {},
    "nemotron": {},
    "helium": {},
    "ernie4_5": {},
    "seed_oss": {},
    "arcee": {},
    "apertus": {},
    "bitnet": {},
    "exaone4": {},
    "ministral": {},
    "ministral3": {},
    "hunyuan_v1_dense": {},
    "mixtral": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "olmoe": {},
    "granitemoe": {},
    "gpt_oss": {},
    "phimoe": {},
    "llama4_text": {},
    "diffllama": {},
    "deepseek_v3": _MLA,
    "lfm2": {},
}
"""Family -> what its configuration needs besides the sizes."""


def family_config(family: str) -> PreTrainedConfig:
    known = type(AutoConfig.for_model(family))
    names = {*AutoConfig.for_model(family).to_dict(), *known.attribute_map}
    return known(**{name: size for name, size in _SIZES.items() if name in names} | FAMILIES[family])


def family_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Random weights; experts, where there are any, as batched products, which have no data-dependent sizes."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    if any(name.endswith("experts") for name, _ in model.named_modules()):
        model.set_experts_implementation("batched_mm")
    return model

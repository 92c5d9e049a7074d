"""Tiny random decoders of every family, and `transformers` itself as the oracle of what they say.

The weights are large and the norms uneven, so that attention decides the next token: a wrong mask, a stale cache or a swapped
head shows in the logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config

VOCAB = 97
WINDOW = 6
FAMILIES = ("llama", "qwen3", "gemma3")
_SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": VOCAB, "max_position_embeddings": 512}


def tiny_config(family: str) -> PreTrainedConfig:
    """Grouped-query attention everywhere; Gemma 3 alternates sliding (WINDOW) and full layers, with two rotations."""
    if family == "llama":
        return LlamaConfig(**_SIZES, num_hidden_layers=2, num_key_value_heads=2, tie_word_embeddings=True)
    if family == "qwen3":
        return Qwen3Config(**_SIZES, num_hidden_layers=2, num_key_value_heads=2, head_dim=32, tie_word_embeddings=False)
    return Gemma3TextConfig(
        **_SIZES,
        num_hidden_layers=3,
        num_key_value_heads=1,
        head_dim=32,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        query_pre_attn_scalar=32,
    )


def random_model(config: PreTrainedConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The stock model with its own eager attention and weights fixed by `seed`."""
    generator = torch.Generator().manual_seed(seed)
    smallest_norm = 0.0 if config.model_type == "gemma3_text" else 0.75  # Gemma's norms scale by 1 + weight
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 2 / parameter.shape[-1] ** 0.5)
        else:
            parameter.copy_(torch.rand(parameter.shape, generator=generator) * 0.5 + smallest_norm)
    return model


def last_logits(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """float32 `[vocab]`: what the model says after `tokens`, computed from scratch without a cache."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, -1].float()


def greedy(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """`count` tokens of `generate` without sampling, whatever the model thinks of ending."""
    with torch.no_grad():
        out = model.generate(
            torch.tensor([list(prompt)]),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            pad_token_id=0,
            eos_token_id=None,
        )
    return out[0, len(prompt) :].tolist()


def random_prompt(length: int, seed: int) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()

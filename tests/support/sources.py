"""Model sources on disk, made from the tiny decoders: what a user would name in `quire compile`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from tests.support.decoders import random_model, tiny_config
from tests.support.tokenizers import byte_level_tokenizer

VOCAB = 400
BOS_ID, EOS_ID = 0, 1
_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
}
_GGUF_NAMES_GEMMA = _GGUF_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def source_config(family: str) -> PreTrainedConfig:
    """The tiny decoder with the vocabulary of the tiny tokenizer."""
    config = tiny_config(family)
    config.vocab_size, config.bos_token_id, config.eos_token_id = VOCAB, BOS_ID, EOS_ID
    return config


def write_checkpoint(directory: Path, family: str = "llama", *, shard_size: str = "1GB") -> PreTrainedModel:
    """A Hugging Face directory of `family`; returns the model whose weights it holds."""
    model = random_model(source_config(family))
    model.save_pretrained(directory, max_shard_size=shard_size)
    byte_level_tokenizer(VOCAB).save(str(directory / "tokenizer.json"))
    return model


def edit_json(path: Path, **changes: Any) -> None:
    """Set fields of a JSON object; the value None removes one."""
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))


def write_gguf(
    path: Path, family: str = "llama", *, packing: gguf.GGMLQuantizationType | None = None, parts: int = 1, **metadata: Any
) -> PreTrainedModel:
    """A GGUF file of `family`, its matrices packed as `packing` (None: float32); returns the model whose weights it holds.

    `metadata` replaces values by their key without the architecture's prefix, dots written as `__`.
    """
    config = source_config(family)
    model = random_model(config)
    writer = gguf.GGUFWriter(path, family)
    writer.add_string("general.name", f"tiny {family}")
    for key, value in (_metadata(config) | {name.replace("__", "."): value for name, value in metadata.items()}).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{family}.{key}", value)
    if parts > 1:
        writer.add_uint16("split.count", parts)
    _add_tokenizer(writer)
    for name, values in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stored = _as_stored(family, name, values, config).numpy()
        if packing is not None and stored.ndim == 2:
            writer.add_tensor(_gguf_name(family, name), gguf.quants.quantize(stored, packing), raw_dtype=packing)
        else:
            writer.add_tensor(_gguf_name(family, name), np.ascontiguousarray(stored))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _metadata(config: PreTrainedConfig) -> dict[str, Any]:
    fields = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
    }
    if getattr(config, "head_dim", None):
        fields["attention.key_length"] = config.head_dim
    if config.model_type == "gemma3_text":
        fields["attention.sliding_window"] = config.sliding_window
    return fields


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    model = json.loads(byte_level_tokenizer(VOCAB).to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in ("<s>", "</s>") else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)


def _gguf_name(family: str, name: str) -> str:
    names = _GGUF_NAMES_GEMMA if family == "gemma3" else _GGUF_NAMES
    module = name.removesuffix(".weight")
    if module in names:
        return f"{names[module]}.weight"
    _, _, layer, inner = module.split(".", 3)
    return f"blk.{layer}.{names[inner]}.weight"


def _as_stored(family: str, name: str, values: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor:
    """What llama.cpp's converter does to a tensor before it writes it."""
    if family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        per_head = values.reshape(heads, 2, values.shape[0] // heads // 2, values.shape[1])
        return per_head.swapaxes(1, 2).reshape(values.shape)
    if family == "gemma3" and name.endswith("norm.weight"):
        return values + 1
    return values

"""A GGUF file as a model of one family: metadata to config, packed tensors to canonical weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import quants
from transformers import PreTrainedConfig

from compiler_service.ingest.families import FAMILIES, Family
from compiler_service.ingest.gguf_header import ArrayLength, GgufHeader, GgufTensor, read_gguf_header
from compiler_service.ingest.model_config import build_config, check_sizes, head_dim
from compiler_service.ingest.shapes import EMBEDDING, HEAD, check_layer_count, check_shapes, expected_shapes
from compiler_service.ingest.tokenizer import token_ids
from shared.errors import SourceInvalid, UnsupportedModel

_TOP = {"token_embd.weight": EMBEDDING, "output_norm.weight": "model.norm.weight", "output.weight": HEAD}
_BLOCK = re.compile(r"blk\.(\d{1,4})\.([a-z_]+)\.weight")
GEMMA_LOCAL_ROPE_THETA = 10000.0
"""Not in the file: every Gemma 3 has it, as it has full attention in each sixth layer (the config class's own default)."""
GEMMA_27B_LAYERS = 62


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A checked file. `packed` maps each canonical weight of `shapes` to its place in the file."""

    path: Path
    family: Family
    config: PreTrainedConfig
    name: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    shapes: Mapping[str, tuple[int, ...]]
    packed: Mapping[str, GgufTensor]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, float32 values) in the order of `shapes`, unpacked one at a time."""
        data = np.memmap(self.path, mode="r", dtype=np.uint8)
        for name in self.shapes:
            tensor = self.packed[name]
            raw = data[tensor.begin : tensor.end]
            rows = raw.reshape(*tensor.shape[:-1], -1)
            values = torch.from_numpy(np.array(quants.dequantize(rows, tensor.kind), dtype=np.float32).reshape(tensor.shape))
            yield name, self.family.restore(values, name, self.config)


def open_gguf(path: Path) -> GgufModel:
    """Check the header of `path` against itself and against the architecture it declares, without unpacking anything.

    SourceInvalid for a corrupt or contradictory file, UnsupportedModel for another architecture, packing or rotary scaling.
    """
    header = read_gguf_header(path)
    family = _family_of(header)
    if (parts := header.metadata.get("split.count", 1)) != 1:
        raise UnsupportedModel(
            f"{path.name} is one of {str(parts)[:20]} parts of a model; join them with llama-gguf-split --merge first"
        )
    names = {name: _canonical(family, name) for name in header.tensors}
    unknown = sorted(name for name, canonical in names.items() if canonical is None)
    if unknown:
        raise UnsupportedModel(f"{path.name} holds tensors that {family.architecture} has not: {', '.join(unknown[:8])[:400]}")
    packed = {canonical: header.tensors[name] for name, canonical in names.items() if canonical is not None}
    config = build_config(family, _config_fields(family, header))
    _check_head_axes(config, _Metadata(header, family.gguf_architecture))
    check_layer_count(config, {int(match[1]) for name in header.tensors if (match := _BLOCK.fullmatch(name))})
    shapes = expected_shapes(config)
    check_shapes(shapes, {name: tensor.shape for name, tensor in packed.items()})
    name = header.metadata.get("general.name")
    bos, eos = _token_ids(header, config)
    return GgufModel(path, family, config, name if isinstance(name, str) else path.stem, bos, eos, shapes, packed)


def _family_of(header: GgufHeader) -> Family:
    declared = header.metadata.get("general.architecture")
    for family in FAMILIES:
        if declared == family.gguf_architecture:
            return family
    known = ", ".join(family.gguf_architecture for family in FAMILIES)
    raise UnsupportedModel(f"supported GGUF architectures are {known}; the file declares {str(declared)[:80]!r}")


def _canonical(family: Family, name: str) -> str | None:
    if name in _TOP:
        return _TOP[name]
    match = _BLOCK.fullmatch(name)
    if match is None or match[2] not in family.block:
        return None
    return f"model.layers.{int(match[1])}.{family.block[match[2]]}.weight"


class _Metadata:
    """The metadata of one architecture, read by key and checked by type."""

    def __init__(self, header: GgufHeader, architecture: str) -> None:
        self._values, self._architecture = header.metadata, architecture

    def get(self, key: str) -> Any:
        return self._values.get(f"{self._architecture}.{key}")

    def need(self, key: str) -> Any:
        if (value := self.get(key)) is None:
            raise SourceInvalid(f"the file lacks {self._architecture}.{key}")
        return value

    def positive(self, key: str, *, default: float | None = None) -> float:
        """A finite number above 0, at most 1e12."""
        value = self.need(key) if default is None or self.get(key) is not None else default
        if not isinstance(value, float) or not 0 < value <= 1e12:
            raise SourceInvalid(f"{self._architecture}.{key} must be a positive number; got {str(value)[:40]!r}")
        return value


def _config_fields(family: Family, header: GgufHeader) -> dict[str, Any]:
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or not isinstance(tokens, ArrayLength):
        raise SourceInvalid("the file lacks token_embd.weight or tokenizer.ggml.tokens")
    if tokens.count > embedding.shape[0]:
        raise SourceInvalid(f"the file has {tokens.count} tokens and embeddings for {embedding.shape[0]}")
    read = _Metadata(header, family.gguf_architecture)
    fields = {
        "vocab_size": embedding.shape[0],
        "hidden_size": read.need("embedding_length"),
        "intermediate_size": read.need("feed_forward_length"),
        "num_hidden_layers": read.need("block_count"),
        "num_attention_heads": read.need("attention.head_count"),
        "num_key_value_heads": read.need("attention.head_count_kv"),
        "max_position_embeddings": read.need("context_length"),
        "rms_norm_eps": read.positive("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_parameters": _rope(read),
    }
    # A file without key_length means hidden_size / heads; the families' own defaults may differ, so it is always stated.
    check_sizes(fields)  # before anything is derived from them
    fields["head_dim"] = read.get("attention.key_length") or fields["hidden_size"] // fields["num_attention_heads"]
    return fields | (_gemma3(fields, read) if family.gguf_architecture == "gemma3" else {})


def _rope(read: _Metadata) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": read.positive("rope.freq_base", default=10000.0), "rope_type": "default"}
    scaling = read.get("rope.scaling.type")
    if scaling == "linear":
        rope |= {"rope_type": "linear", "factor": read.positive("rope.scaling.factor")}
    elif scaling not in (None, "none"):
        raise UnsupportedModel(f"rope scaling of a GGUF file must be none or linear; the file has {str(scaling)[:40]!r}")
    return rope


def _gemma3(fields: dict[str, Any], read: _Metadata) -> dict[str, Any]:
    """What Gemma 3 adds: windows, two rotary tables (scaling, if any, on the full layers), and the 27B's own query scale."""
    is_27b = fields["num_hidden_layers"] == GEMMA_27B_LAYERS
    return {
        "sliding_window": read.need("attention.sliding_window"),
        "query_pre_attn_scalar": fields["hidden_size"] // fields["num_attention_heads"] if is_27b else fields["head_dim"],
        "rope_parameters": {
            "full_attention": fields["rope_parameters"],
            "sliding_attention": {"rope_theta": GEMMA_LOCAL_ROPE_THETA, "rope_type": "default"},
        },
    }


def _check_head_axes(config: PreTrainedConfig, read: _Metadata) -> None:
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        if read.get(key) not in (None, head_dim(config)):
            raise UnsupportedModel(
                f"{key} must equal the head dimension {head_dim(config)}; the file has {str(read.get(key))[:40]}"
            )


def _token_ids(header: GgufHeader, config: PreTrainedConfig) -> tuple[int | None, tuple[int, ...]]:
    ids = {name: header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot")}
    ends = [ids[name] for name in ("eos", "eot") if ids[name] is not None]
    return token_ids(ids["bos"], ends, config.vocab_size)

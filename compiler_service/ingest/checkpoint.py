"""A Hugging Face checkpoint directory, checked from its headers: config.json, safetensors (one file or shards), tokenizer.json."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PreTrainedConfig

from compiler_service.ingest.checkpoint_files import CONFIG, GENERATION, INDEX, TOKENIZER, read_json, weight_map_of, weight_names
from compiler_service.ingest.model_config import build_config, family_of
from compiler_service.ingest.safetensors_header import TensorEntry, read_safetensors_header
from compiler_service.ingest.shapes import EMBEDDING, HEAD, check_layer_count, check_shapes, expected_shapes
from compiler_service.ingest.source import Source
from compiler_service.ingest.tokenizer import token_ids
from shared.errors import SourceInvalid, UnsupportedModel

_FLOATS = frozenset({"F32", "F16", "BF16"})
_DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")
"""Tables old checkpoints store although the config gives them."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checked directory. `shapes` are the canonical weights; `shards` says which file holds each."""

    config: PreTrainedConfig
    name: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    shapes: Mapping[str, tuple[int, ...]]
    shards: Mapping[str, Path]
    tokenizer: Path

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, values) in the order of `shapes`, read one at a time."""
        files = {path: safe_open(path, framework="pt") for path in set(self.shards.values())}
        for name in self.shapes:
            yield name, files[self.shards[name]].get_tensor(name)  # type: ignore[no-untyped-call]  # the library ships no types


def open_checkpoint(source: Source) -> Checkpoint:
    """Check the directory of `source` without reading weight data.

    SourceInvalid for missing, cut or contradictory files; UnsafeSource for pickled weights and remote code; UnsupportedModel for
    another architecture or quantised weights.
    """
    fields = read_json(source.file(CONFIG))
    family = family_of(fields)
    shards = [source.file(name) for name in weight_names(source)]
    config = build_config(family, fields)
    placed = _place(source, shards)
    check_layer_count(config, {int(match[1]) for name in placed if (match := _LAYER.match(name))})
    shapes = expected_shapes(config)
    _check_tie(config, placed)
    check_shapes(shapes, {name: entry.shape for name, (_, entry) in placed.items()})
    generation = source.file(GENERATION)
    declared = {**fields, **(read_json(generation) if generation.is_file() else {})}
    tokenizer = source.file(TOKENIZER)
    if not tokenizer.is_file():
        raise SourceInvalid(f"{source.path.name} has no {TOKENIZER}")
    bos, eos = token_ids(declared.get("bos_token_id"), declared.get("eos_token_id"), config.vocab_size)
    return Checkpoint(config, source.path.name, bos, eos, shapes, {name: path for name, (path, _) in placed.items()}, tokenizer)


def _place(source: Source, shards: list[Path]) -> dict[str, tuple[Path, TensorEntry]]:
    """Tensor -> (file, entry) over all shards, checked against the index."""
    placed: dict[str, tuple[Path, TensorEntry]] = {}
    for shard in shards:
        for name, entry in read_safetensors_header(shard).items():
            if name in placed:
                raise SourceInvalid(f"tensor {name[:120]} is in {placed[name][0].name} and in {shard.name}")
            if entry.dtype not in _FLOATS and not _DERIVED.search(name):
                raise UnsupportedModel(f"weights must be F32, F16 or BF16; {name[:120]} is {entry.dtype}")
            placed[name] = (shard, entry)
    index = source.file(INDEX)
    if index.is_file():
        for name, shard_name in weight_map_of(index).items():
            if name not in placed or placed[name][0] != source.file(shard_name):
                raise SourceInvalid(f"{INDEX} puts {name[:120]} into {shard_name}, which does not hold it")
    return {name: place for name, place in placed.items() if not _DERIVED.search(name)}


def _check_tie(config: PreTrainedConfig, placed: dict[str, tuple[Path, TensorEntry]]) -> None:
    """A tied head stored as well must be the embedding; it is then dropped."""
    if not config.tie_word_embeddings or HEAD not in placed or EMBEDDING not in placed:
        return
    head, embedding = (_bytes(*placed[name]) for name in (HEAD, EMBEDDING))
    if head != embedding:
        raise SourceInvalid(f"config and weights disagree: tie_word_embeddings is true, but {HEAD} differs from {EMBEDDING}")
    del placed[HEAD]


def _bytes(path: Path, entry: TensorEntry) -> bytes:
    with path.open("rb") as file:
        file.seek(entry.begin)
        return file.read(entry.end - entry.begin)

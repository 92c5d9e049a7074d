"""Which files of a checkpoint directory decide the model. Reads small JSON files only, and no library that reads weights."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

from compiler_service.ingest.source import PICKLE_SUFFIXES, Source, SourceKind
from shared.errors import SourceInvalid, UnsafeSource

CONFIG, TOKENIZER, GENERATION = "config.json", "tokenizer.json", "generation_config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_JSON_BYTES = 64 << 20
MAX_INDEX_BYTES = 8 << 20
"""The service itself reads the index; one of a thousand shards takes a tenth of that."""


def source_files(source: Source) -> tuple[Path, ...]:
    """The files that decide the model, in a fixed order; what else a directory holds does not matter.

    SourceInvalid lists files and shards that are missing; UnsafeSource where the weights are pickled.
    """
    if source.kind is SourceKind.PROGRAM:
        if not source.file(TOKENIZER).is_file():
            raise SourceInvalid(f"a program holds no tokenizer; {source.path.name} needs {TOKENIZER} beside it")
        return source.path, source.file(TOKENIZER)
    if source.kind is not SourceKind.CHECKPOINT:
        return (source.path,)
    needed = [source.file(name) for name in (CONFIG, TOKENIZER, *weight_names(source))]
    if missing := [path.name for path in needed if not path.is_file()]:
        raise SourceInvalid(f"{source.path.name} has no {', '.join(missing)}")
    return (*needed, *(path for path in map(source.file, (INDEX, GENERATION)) if path.is_file()))


def weight_names(source: Source) -> list[str]:
    """Names of the safetensors files of a checkpoint directory: the shards its index lists, or the single file."""
    index = source.file(INDEX)
    if index.is_file():
        weight_map = weight_map_of(index)
        names = sorted(set(weight_map.values()))
        missing = [name for name in names if not source.file(name).is_file()]
        if missing:
            raise SourceInvalid(
                f"{len(missing)} of {len(names)} shards are missing: {', '.join(missing[:32])}; fetch the checkpoint again"
            )
        return names
    if source.file(SINGLE).is_file():
        return [SINGLE]
    pickled = sorted(path.name for path in source.path.iterdir() if path.suffix.lower() in PICKLE_SUFFIXES)
    if pickled:
        raise UnsafeSource(
            f"the weights are pickled ({', '.join(pickled[:8])}), which runs code when read; convert them to safetensors"
        )
    raise SourceInvalid(f"{source.path.name} holds neither {SINGLE} nor {INDEX}")


def weight_map_of(index: Path) -> dict[str, str]:
    """Tensor -> shard as the index of a sharded checkpoint states it, shard names checked to be plain."""
    weight_map = read_json(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceInvalid(f"{index.name} must hold a weight_map")
    for shard in weight_map.values():
        if not isinstance(shard, str) or PurePosixPath(shard).name != shard or not shard.endswith(".safetensors"):
            raise SourceInvalid(f"{index.name} must name shards as plain .safetensors file names; got {str(shard)[:120]!r}")
    return weight_map


def read_json(path: Path, most_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in `path`; SourceInvalid where there is none, or one of more than `most_bytes`."""
    if not path.is_file():
        raise SourceInvalid(f"the checkpoint has no {path.name}")
    if path.stat().st_size > most_bytes:
        raise SourceInvalid(f"{path.name} must be at most {most_bytes} bytes; it is {path.stat().st_size}")
    try:
        fields = json.loads(path.read_bytes())
    except OSError as error:
        raise SourceInvalid(f"{path.name} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise SourceInvalid(f"{path.name} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise SourceInvalid(f"{path.name} must be a JSON object; got {type(fields).__name__}")
    return fields

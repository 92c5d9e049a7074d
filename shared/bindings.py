"""Names, roles and shapes of what an engine reads and writes. Written by the builder, believed only after reading back."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    INPUT = "input"
    OUTPUT = "output"
    WEIGHT = "weight"
    CACHE = "cache"


INPUT_IDS = "input_ids"
"""int32 `[batch, query_len]`, every id in `0..vocab_size`."""
POSITION_IDS = "position_ids"
"""int32 `[batch, query_len]`, logical positions: what RoPE sees."""
WRITE_START = "write_start"
"""int32 `[batch]`, physical: the ordinal the first new token of each row is written to."""
LAST_INDEX = "last_index"
"""int32 `[batch]`, which of the row's new tokens the logits are wanted for."""
BLOCK_TABLE = "block_table"
"""int32 `[batch, max_pages]`, ordinal page -> PageId. Linear layout: `[batch, 1]`, the slot."""
LOGITS = "logits"
"""float32 `[batch, vocab_size]`."""


def pool_name(layer: int) -> str:
    """Name of one layer's pool binding."""
    return f"kv_pool.{layer}"


def cache_name(layer: int, kind: str) -> str:
    """Name of one layer's K or V cache (`kind` is `k` or `v`) in the linear program."""
    return f"{kind}_cache.{layer}"


def updated_name(cache: str) -> str:
    """Name of the output that is the written cache, in engines whose outputs alias their inputs."""
    return f"{cache}.updated"


@dataclass(frozen=True, slots=True)
class BindingSpec:
    """`shape` has None where a profile decides; `dtype` is torch's name without the prefix (`float32`)."""

    name: str
    role: Role
    dtype: str
    shape: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class AliasedBinding:
    """Output `output` lives at the address of input `input`: the write is in place."""

    input: str
    output: str

"""Names, roles and shapes of what an engine reads and writes. Written by the builder, believed only after reading back."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What a binding is to the engine. A cache is read, and written in place."""

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
PACKED_ORDER = "packed_order"
"""int32 `[2 * tokens]`, for engines that write a paged pool as packed rows (below): the keys' and values' new rows, counted keys
first, in the order of the pool rows that take them. Rows bound for the dump page are not among them."""
PACKED_ENDS = "packed_ends"
"""int32 `[2 * num_pages + 1]`: exclusive prefix sum of how many new rows each pool row takes. Pool row 2p holds the keys of page
p, row 2p + 1 its values."""
PACKED_OFFSETS = "packed_offsets"
"""int32 `[2 * num_pages]`: the cell of each pool row that its first new row goes to."""
LOGITS = "logits"
"""float32 `[batch, vocab_size]`."""


def pool_name(layer: int) -> str:
    """Name of one layer's pool binding."""
    return f"kv_pool.{layer}"


def cache_name(layer: int, kind: str) -> str:
    """Name of one layer's K or V cache (`kind` is `k` or `v`) in the linear program."""
    return f"{kind}_cache.{layer}"


def layer_of(cache: str) -> int:
    """The layer of a `cache_name`."""
    return int(cache.rpartition(".")[2])


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

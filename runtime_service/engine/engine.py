"""What the serving loop needs of an engine: its manifest, one step, an end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from runtime_service.kv.pool import KVPool
from shared.manifest import EngineManifest


@dataclass(frozen=True, slots=True)
class EngineInputs:
    """One step of `batch` rows with `query_len` new tokens each: int32 tensors on the host, described in shared/bindings.py.

    `input_ids` may lie on the engine's device: ids sampled there, which nobody on the host has seen and everybody trusts.

    A row with fewer real tokens is padded at its end; a padded cell is written behind the row's real ones, so the row's block
    table maps it to a page of its own or to the dump page. A padding row has write_start 0 and a block table of zeros.
    """

    profile: str
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    write_start: torch.Tensor
    last_index: torch.Tensor
    block_table: torch.Tensor

    @property
    def batch(self) -> int:
        return self.input_ids.shape[0]

    @property
    def query_len(self) -> int:
        return self.input_ids.shape[1]


class Engine(Protocol):
    """A loaded engine. One caller at a time: the serving loop's thread."""

    @property
    def manifest(self) -> EngineManifest: ...

    @property
    def runs_ahead(self) -> bool:
        """Whether `run` returns before the logits are there: they are on a device, and what is launched next finds them."""
        ...

    def run(self, inputs: EngineInputs, pool: KVPool) -> torch.Tensor:
        """Write the new keys and values into `pool` in place and return logits, float32 `[batch, vocab_size]`.

        FieldOutOfRange, with nothing written, when an input has another shape or dtype, a value outside its range, or a
        profile that does not admit the shape.
        """
        ...

    def close(self) -> None:
        """Free what the engine holds. Running it afterwards is an InternalError."""
        ...

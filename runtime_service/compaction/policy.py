"""What an eviction policy is: a score for every entry, higher = keep. How many stay, and in what order, is decided elsewhere."""

from __future__ import annotations

from typing import Protocol

import torch

from runtime_service.core.entries import Rows
from runtime_service.core.sequence import Sequence as KVSequence
from runtime_service.kv.pool import KVPool
from shared.kernels.compaction.modes import RowMode


class KVView:
    """What a policy may read of one sequence. Valid during one round; keys are read only when asked for."""

    def __init__(self, sequence: KVSequence, pool: KVPool) -> None:
        self._sequence = sequence
        self._pool = pool

    @property
    def length(self) -> int:
        """Entries held, the physical length."""
        return self._sequence.physical_len

    @property
    def logical_length(self) -> int:
        """Tokens computed; the next one has this position."""
        return self._sequence.computed

    @property
    def positions(self) -> Rows:
        """Logical position of each entry, int32 `[rows, length]`; one row until a round lets heads keep entries of their own."""
        return self._sequence.positions

    def key_norms(self) -> list[torch.Tensor]:
        """Norms of the keys of each layer that holds every entry, ascending: float32 `[kv_heads, length]`, on the pool's device.

        Sliding-window layers do not: of what lies behind their window nothing is left.
        """
        return self._pool.key_norms(self._sequence.pages, self.length)


class Policy(Protocol):
    """Stateless, and the same scores for the same view: rounds are replayed from what was decided, not scored again."""

    @property
    def rows(self) -> RowMode:
        """Which heads share a decision; `score` has a row for each decision."""
        ...

    @property
    def reads_keys(self) -> bool:
        """Whether `score` asks for keys, and so needs a layer that holds every entry."""
        ...

    def score(self, view: KVView) -> torch.Tensor:
        """float32 `[rows, length]`, higher = keep, never NaN; where it was computed: nothing waits for a device here."""
        ...

"""Which token each entry of a cache is: the map ordinal -> position, of every decision row.

    after a round     survivors of the round, in the order in which their cells lie
    since the round   every token, in order

So a step costs nothing here, and the length is the map's own size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int32]
"""int32 `[rows, n]`. A row belongs to the heads that keep the same entries; one row belongs to all of them."""


@dataclass(frozen=True, slots=True, eq=False)
class EntryMap:
    """`survivors[r, o]` is the position of ordinal o in row r as a round left it when `at` tokens were computed."""

    survivors: Rows
    at: int

    @classmethod
    def empty(cls) -> EntryMap:
        return cls(np.empty((1, 0), dtype=np.int32), 0)

    def length(self, computed: int) -> int:
        """Entries held once `computed` tokens are."""
        return int(self.survivors.shape[1]) + computed - self.at

    def positions(self, computed: int) -> Rows:
        """Position of every entry, `[rows, length]`: ascending in each row unless a round filled holes."""
        since = np.arange(self.at, computed, dtype=np.int32)
        return np.concatenate([self.survivors, np.broadcast_to(since, (len(self.survivors), len(since)))], axis=1)

    def reordered(self, order: Rows, computed: int) -> EntryMap:
        """After a round that put the entry of ordinal `order[r, o]` at ordinal o. Heads that shared a row may part here."""
        positions = self.positions(computed)
        row = np.arange(len(order))[:, None] if len(positions) > 1 else 0
        return EntryMap(positions[row, order], computed)


def ordinals_of(mask: NDArray[np.bool_]) -> Rows:
    """Where each row of `mask` is set, ascending; every row in as many places."""
    flat = np.flatnonzero(mask).reshape(len(mask), -1)
    ordinals: Rows = (flat - np.arange(len(mask))[:, None] * mask.shape[1]).astype(np.int32)
    return ordinals

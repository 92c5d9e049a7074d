"""Which entries of a sequence survive a round. The count rule, the ties and the order live here, once, for every policy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime_service.core.entries import Rows, ordinals_of
from shared.kernels.compaction.modes import RowMode


@dataclass(frozen=True, slots=True, eq=False)
class KeepDecision:
    """Of `length` entries those at ordinals `kept[r]` stay in the heads that follow row r (`rows` says which); all keep as many.

    ValueError unless each row of `kept` is strictly ascending, within `0..length`, and not empty.
    """

    length: int
    kept: Rows
    rows: RowMode = RowMode.UNION

    def __post_init__(self) -> None:
        if not self.kept.size:
            raise ValueError(f"a round must keep at least one of {self.length} entries")
        falls = self.kept[:, 1:] <= self.kept[:, :-1]
        if falls.any():
            row, index = np.nonzero(falls)
            before, after = self.kept[row[0], index[0] : index[0] + 2]
            raise ValueError(f"kept ordinals must strictly ascend, got {before} then {after}, row {row[0]} index {index[0] + 1}")
        lowest, highest = self.kept[:, 0].min(), self.kept[:, -1].max()
        if lowest < 0 or highest >= self.length:
            raise ValueError(f"kept ordinals must lie in 0..{self.length}, got {lowest}..{highest}")

    @property
    def num_evicted(self) -> int:
        """Entries that each row drops."""
        return self.length - int(self.kept.shape[1])


def keep_best(scores: NDArray[np.float32], positions: Rows, budget: int, sinks: int, rows: RowMode = RowMode.UNION) -> KeepDecision:
    """Keep the first `sinks` entries and, of the rest, those of the highest scores: `budget` in all, or every one if fewer.

    `scores` float32 `[rows, length]`; `positions` of the entries, one row for all or as many rows as there are scores. Among equal
    scores the newest stays. ValueError for a NaN score or for sinks that leave no room for anything else.
    """
    if not 0 <= sinks < budget:
        raise ValueError(f"sinks must be 0 to {budget - 1} (below the budget), got {sinks}")
    if np.isnan(scores).any():
        row, ordinal = np.argwhere(np.isnan(scores))[0]
        raise ValueError(f"the score of ordinal {ordinal} in row {row} is NaN; a policy scores every entry with a number")
    num_rows, length = scores.shape
    kept = np.ones((num_rows, length), dtype=bool)
    if length > budget:
        dropped = length - budget
        ranks = _ranks(scores[:, sinks:], np.broadcast_to(positions, scores.shape)[:, sinks:])
        kept[:, sinks:] = ranks >= np.partition(ranks, dropped, axis=1)[:, dropped, None]
    return KeepDecision(length, ordinals_of(kept), rows)


def _ranks(scores: NDArray[np.float32], positions: Rows) -> NDArray[np.int64]:
    """Score, then age, in one integer each, none of them equal: a round that filled holes has left entries out of age's order."""
    bits = (scores + np.float32(0)).view(np.int32).astype(np.int64)  # + 0: minus zero is no less than zero
    by_score = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # the bits of negative floats fall as they rise
    return (by_score << 32) | positions

"""Which entries of a sequence survive a round. The count rule, the ties and the order live here, once, for every policy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ordinals = NDArray[np.int32]
"""Ordinals of one sequence, int32 `[n]`."""


@dataclass(frozen=True, slots=True, eq=False)
class KeepDecision:
    """Of `length` entries those at ordinals `kept` stay, in all layers and heads (the *union* row mode).

    ValueError unless `kept` is strictly ascending, within `0..length`, and not empty.
    """

    length: int
    kept: Ordinals

    def __post_init__(self) -> None:
        if not len(self.kept):
            raise ValueError(f"a round must keep at least one of {self.length} entries")
        steps = np.diff(self.kept)
        if (steps <= 0).any():
            at = int(np.argmax(steps <= 0))
            raise ValueError(f"kept ordinals must strictly ascend, got {self.kept[at]} then {self.kept[at + 1]} at index {at + 1}")
        if self.kept[0] < 0 or self.kept[-1] >= self.length:
            raise ValueError(f"kept ordinals must lie in 0..{self.length}, got {self.kept[0]}..{self.kept[-1]}")

    @property
    def num_evicted(self) -> int:
        return self.length - len(self.kept)


def keep_best(scores: NDArray[np.float32], budget: int, sinks: int) -> KeepDecision:
    """Keep the first `sinks` entries and, of the rest, those of the highest scores: `budget` in all, or every one if fewer.

    `scores` float32 `[length]`. Among equal scores the newest stays. ValueError for a NaN score or for sinks that leave no room
    for anything else.
    """
    if not 0 <= sinks < budget:
        raise ValueError(f"sinks must be 0 to {budget - 1} (below the budget), got {sinks}")
    if np.isnan(scores).any():
        raise ValueError(f"the score of ordinal {int(np.isnan(scores).argmax())} is NaN; a policy scores every entry with a number")
    length = len(scores)
    sinks = min(sinks, length)
    # A stable ascending sort leaves equal scores oldest first, so the tail holds the newest of them.
    ascending = np.argsort(scores[sinks:], kind="stable") + sinks
    best = ascending[max(0, len(ascending) - (budget - sinks)) :]
    return KeepDecision(length, np.concatenate([np.arange(sinks), np.sort(best)]).astype(np.int32))

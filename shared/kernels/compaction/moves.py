"""The moves of one decision row, in ordinals: the arithmetic that plans, statistics and the portable mover share. No tensors.

A list of moves is executed as if every source were read before the first store. Its first `ordered` entries are sorted so that
a store can only clobber sources of entries before it (or its own): a forward tiled copy in place is then safe, as long as one
agent walks them and a tile's loads finish before its stores. The rest are independent of everything.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ZERO = -1
"""Source of a scrubbed cell: the destination becomes zeros."""


@dataclass(frozen=True, slots=True)
class Moves:
    """Entry i moves ordinal `src[i]` (or zeros where `src[i]` is ZERO) to ordinal `dst[i]`; identity moves are left out."""

    src: NDArray[np.int32]
    dst: NDArray[np.int32]
    ordered: int

    def __len__(self) -> int:
        return len(self.src)


def scrub_end(end: int, old_end: int, page_size: int) -> int:
    """One past the last vacated cell of the page that holds the new end `end`; `old_end` is the end before the round.

    With pages of 4, a sequence that shrinks from 11 cells to 6 leaves 6 and 7 to scrub (8..11 lie on a page that is released).
    """
    return min(old_end, -(-end // page_size) * page_size)


def ordered_moves(kept: NDArray[np.int32], base: int, valid_len: int, tail: int, scrub_to: int = 0) -> Moves:
    """Survivors in order to `base..`, the tail behind them, zeros up to `scrub_to`.

    kept [0, 1, 5, 9, 10] of 11 at base 0 moves 5 -> 2, 9 -> 3, 10 -> 4.
    """
    src = np.concatenate([kept, np.arange(valid_len, valid_len + tail)])
    return _build(src, base, scrub_to)


def window_moves(window: int, keep: int, base: int, valid_len: int, tail: int, scrub_to: int = 0) -> Moves:
    """The newest `window` entries and the tail, ending where the full layers end: a shift by what those evicted."""
    start = base + keep - window
    src = np.arange(valid_len - window, valid_len + tail)
    return _build(src, start, scrub_to)


def hole_filling_moves(kept: NDArray[np.int32], base: int, valid_len: int, tail: int, scrub_to: int = 0) -> Moves:
    """Survivors beyond the new length into the holes below it, lowest to lowest; the tail in order behind.

    kept [0, 1, 5, 9, 10] of 11 at base 0 has holes 2, 3, 4 and moves 5 -> 2, 9 -> 3, 10 -> 4; kept [0, 2, 3, 4, 10] only 10 -> 1.

    Cells that the tail or the scrubbing writes may hold survivors, so these leave first: they, the tail and the scrubbed cells
    are the ordered part.
    """
    length = base + len(kept)
    survivors = kept[np.searchsorted(kept, length) :].astype(np.int64)
    holes = np.setdiff1d(np.arange(base, length), kept, assume_unique=True)
    linked = int(np.searchsorted(survivors, max(length + tail, scrub_to))) if tail or scrub_to > length else 0
    behind = _build(np.arange(valid_len, valid_len + tail), length, scrub_to)
    src = np.concatenate([survivors[:linked], behind.src, survivors[linked:]])
    dst = np.concatenate([holes[:linked], behind.dst, holes[linked:]])
    return Moves(src.astype(np.int32), dst.astype(np.int32), ordered=linked + len(behind))


def _build(src: NDArray[np.int64], start: int, scrub_to: int) -> Moves:
    """`src` to `start` and the cells behind it, identity moves dropped, then zeros up to `scrub_to`."""
    end = start + len(src)
    dst, zeroed = np.arange(start, end), np.arange(end, max(scrub_to, end))
    moving = src != dst
    src, dst = np.concatenate([src[moving], np.full(len(zeroed), ZERO)]), np.concatenate([dst[moving], zeroed])
    return Moves(src.astype(np.int32), dst.astype(np.int32), ordered=len(src))

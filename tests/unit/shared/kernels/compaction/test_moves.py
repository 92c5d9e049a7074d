"""The arithmetic of moves: worked examples, and the rule that makes the ordered part safe."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from shared.kernels.compaction.moves import Moves, hole_filling_moves, ordered_moves, scrub_end, window_moves


def kept(*ordinals: int) -> NDArray[np.int32]:
    return np.array(ordinals, dtype=np.int32)


def pairs(moves: Moves) -> list[tuple[int, int]]:
    return list(zip(moves.src.tolist(), moves.dst.tolist(), strict=True))


def test_ordered() -> None:
    moves = ordered_moves(kept(0, 1, 5, 9, 10), base=0, valid_len=11, tail=0)
    assert pairs(moves) == [(5, 2), (9, 3), (10, 4)]
    assert moves.ordered == 3


def test_ordered_with_tail_and_zeros() -> None:
    moves = ordered_moves(kept(4, 7), base=3, valid_len=9, tail=1, scrub_to=8)
    assert pairs(moves) == [(4, 3), (7, 4), (9, 5), (-1, 6), (-1, 7)]
    assert moves.ordered == 5


def test_nothing_evicted_moves_nothing() -> None:
    assert pairs(ordered_moves(kept(3, 4), base=3, valid_len=5, tail=2)) == []
    assert pairs(hole_filling_moves(kept(3, 4), base=3, valid_len=5, tail=2)) == []
    assert pairs(window_moves(2, keep=2, base=3, valid_len=5, tail=2)) == []


def test_window_slides_to_where_the_full_layers_end() -> None:
    moves = window_moves(2, keep=4, base=2, valid_len=64, tail=1)
    assert pairs(moves) == [(62, 4), (63, 5), (64, 6)]


def test_hole_filling_moves_only_survivors_beyond_the_new_length() -> None:
    moves = hole_filling_moves(kept(0, 2, 3, 4, 10), base=0, valid_len=11, tail=0)
    assert pairs(moves) == [(10, 1)]
    assert moves.ordered == 0, "independent of everything"


def test_survivors_under_the_tail_leave_before_it_arrives() -> None:
    moves = hole_filling_moves(kept(0, 3, 4, 5, 9), base=0, valid_len=11, tail=2)
    # New length 5; the tail lands on 5 and 6, where 5 survives; 9 is free to go at any time.
    assert pairs(moves) == [(5, 1), (11, 5), (12, 6), (9, 2)]
    assert moves.ordered == 3


def test_survivors_under_the_zeros_leave_before_them() -> None:
    moves = hole_filling_moves(kept(0, 3, 4, 7, 9), base=0, valid_len=11, tail=0, scrub_to=8)
    assert pairs(moves) == [(7, 1), (-1, 5), (-1, 6), (-1, 7), (9, 2)]
    assert moves.ordered == 4


def test_everything_evicted_but_a_tail() -> None:
    assert pairs(hole_filling_moves(kept(), base=3, valid_len=9, tail=1)) == [(9, 3)]


@pytest.mark.parametrize("build", [ordered_moves, hole_filling_moves])
def test_everything_evicted_leaves_zeros(build: Callable[..., Moves]) -> None:
    """Of a draft whose target kept nothing but its tail."""
    assert pairs(build(kept(), base=1, valid_len=3, tail=0, scrub_to=3)) == [(-1, 1), (-1, 2)]


def test_scrub_end() -> None:
    assert scrub_end(end=6, old_end=11, page_size=4) == 8
    assert scrub_end(end=6, old_end=7, page_size=4) == 7, "cells that were never written need no scrubbing"
    assert scrub_end(end=8, old_end=11, page_size=4) == 8, "the next page is released whole"

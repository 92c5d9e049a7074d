"""The count rule, the ties, the order."""

from __future__ import annotations

import numpy as np
import pytest

from runtime_service.compaction.decision import KeepDecision, keep_best
from shared.kernels.compaction.modes import RowMode


def keep(scores: list[float], budget: int, sinks: int = 0, positions: list[int] | None = None) -> list[int]:
    """One row, of entries that lie in the order they came in unless told otherwise."""
    where = np.asarray([positions or range(len(scores))], dtype=np.int32)
    return keep_best(np.asarray([scores], dtype=np.float32), where, budget, sinks).kept[0].tolist()


def test_the_best_stay_in_ordinal_order_wherever_they_are() -> None:
    """BR-072: the best token last must not come first."""
    assert keep([0.1, 0.5, 0.2, 0.4, 0.9], budget=3) == [1, 3, 4]


def test_among_equal_scores_the_newest_stays() -> None:
    assert keep([1, 1, 1, 1], budget=2) == [2, 3]
    assert keep([1, 2, 1, 2, 1], budget=3) == [1, 3, 4]


def test_the_newest_is_the_one_with_the_highest_position_wherever_it_lies() -> None:
    """After a round that filled holes ordinals no longer tell age."""
    assert keep([1, 1, 1, 1], budget=2, positions=[0, 9, 2, 3]) == [1, 3]
    assert keep([1, 1, 1, 1], budget=3, sinks=1, positions=[0, 9, 2, 3]) == [0, 1, 3]


def test_every_row_keeps_its_own_best_and_all_as_many() -> None:
    scores = np.asarray([[5, 1, 1, 9], [1, 7, 8, 1]], dtype=np.float32)
    positions = np.asarray([[0, 1, 2, 3], [0, 1, 3, 2]], dtype=np.int32)
    decision = keep_best(scores, positions, budget=2, sinks=0, rows=RowMode.PER_HEAD)
    assert (decision.kept.tolist(), decision.rows, decision.num_evicted) == ([[0, 3], [1, 2]], RowMode.PER_HEAD, 2)
    assert keep_best(np.ones((2, 4), dtype=np.float32), positions, budget=2, sinks=0).kept.tolist() == [[2, 3], [2, 3]]


def test_sinks_stay_whatever_they_score() -> None:
    assert keep([-9, -9, 5, 6, 7], budget=3, sinks=2) == [0, 1, 4]
    assert keep([-9, float("-inf"), 5, 6, float("inf")], budget=3, sinks=2) == [0, 1, 4]


@pytest.mark.parametrize("length", [1, 2, 5])
def test_fewer_entries_than_the_budget_are_all_kept(length: int) -> None:
    """BR-073, BR-072 (k = all): nothing is evicted, nothing crashes, the cache is never emptied."""
    decision = keep_best(np.zeros((1, length), dtype=np.float32), np.arange(length, dtype=np.int32)[None], budget=5, sinks=4)
    assert decision.kept.tolist() == [list(range(length))]
    assert decision.num_evicted == 0


def test_sinks_and_one_more_always_stay() -> None:
    """BR-073."""
    assert keep([0.0] * 64, budget=5, sinks=4) == [0, 1, 2, 3, 63]
    with pytest.raises(ValueError, match=r"sinks must be 0 to 4 .* got 5"):
        keep([0.0] * 64, budget=5, sinks=5)


def test_nan_is_no_score() -> None:
    with pytest.raises(ValueError, match="score of ordinal 2 in row 0 is NaN"):
        keep([0, 1, float("nan")], budget=2)


@pytest.mark.parametrize(
    ("kept", "match"),
    [
        ([], "at least one of 4"),
        ([1, 0], "got 1 then 0, row 0 index 1"),
        ([0, 2, 2], "got 2 then 2, row 0 index 2"),
        ([0, 4], r"in 0\.\.4, got 0\.\.4"),
        ([-1, 2], r"in 0\.\.4, got -1\.\.2"),
    ],
)
def test_a_decision_that_is_no_subset_in_order_is_refused(kept: list[int], match: str) -> None:
    """BR-072: unsorted or repeated ordinals."""
    with pytest.raises(ValueError, match=match):
        KeepDecision(4, np.asarray([kept], dtype=np.int32))


def test_the_row_out_of_order_is_named() -> None:
    with pytest.raises(ValueError, match="got 3 then 1, row 1 index 2"):
        KeepDecision(4, np.asarray([[0, 1, 2], [0, 3, 1]], dtype=np.int32))

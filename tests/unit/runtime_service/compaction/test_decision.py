"""The count rule, the ties, the order."""

from __future__ import annotations

import numpy as np
import pytest

from runtime_service.compaction.decision import KeepDecision, keep_best


def keep(scores: list[float], budget: int, sinks: int = 0) -> list[int]:
    return keep_best(np.asarray(scores, dtype=np.float32), budget, sinks).kept.tolist()


def test_the_best_stay_in_ordinal_order_wherever_they_are() -> None:
    """BR-072: the best token last must not come first."""
    assert keep([0.1, 0.5, 0.2, 0.4, 0.9], budget=3) == [1, 3, 4]


def test_among_equal_scores_the_newest_stays() -> None:
    assert keep([1, 1, 1, 1], budget=2) == [2, 3]
    assert keep([1, 2, 1, 2, 1], budget=3) == [1, 3, 4]


def test_sinks_stay_whatever_they_score() -> None:
    assert keep([-9, -9, 5, 6, 7], budget=3, sinks=2) == [0, 1, 4]
    assert keep([-9, float("-inf"), 5, 6, float("inf")], budget=3, sinks=2) == [0, 1, 4]


@pytest.mark.parametrize("length", [1, 2, 5])
def test_fewer_entries_than_the_budget_are_all_kept(length: int) -> None:
    """BR-073, BR-072 (k = all): nothing is evicted, nothing crashes, the cache is never emptied."""
    decision = keep_best(np.zeros(length, dtype=np.float32), budget=5, sinks=4)
    assert decision.kept.tolist() == list(range(length))
    assert decision.num_evicted == 0


def test_sinks_and_one_more_always_stay() -> None:
    """BR-073."""
    assert keep([0.0] * 64, budget=5, sinks=4) == [0, 1, 2, 3, 63]
    with pytest.raises(ValueError, match=r"sinks must be 0 to 4 .* got 5"):
        keep([0.0] * 64, budget=5, sinks=5)


def test_nan_is_no_score() -> None:
    with pytest.raises(ValueError, match="score of ordinal 2 is NaN"):
        keep([0, 1, float("nan")], budget=2)


@pytest.mark.parametrize(
    ("kept", "match"),
    [
        ([], "at least one of 4"),
        ([1, 0], "got 1 then 0 at index 1"),
        ([0, 2, 2], "got 2 then 2 at index 2"),
        ([0, 4], r"in 0\.\.4, got 0\.\.4"),
        ([-1, 2], r"in 0\.\.4, got -1\.\.2"),
    ],
)
def test_a_decision_that_is_no_subset_in_order_is_refused(kept: list[int], match: str) -> None:
    """BR-072: unsorted or repeated ordinals."""
    with pytest.raises(ValueError, match=match):
        KeepDecision(4, np.asarray(kept, dtype=np.int32))

"""The plan of a round against the drawing in its module, and check() against plans that lie."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from runtime_service.compaction.decision import KeepDecision
from runtime_service.compaction.plan import CompactionPlan, Moves, plan_round
from shared.ids import PageId

PAGES = [PageId(7), PageId(3), PageId(9)]


def nobody(page: PageId) -> bool:
    return False


def plan(
    length: int, kept: list[int], *, windows: tuple[int | None, ...] = (None,), reserve: int = 0, shared: tuple[int, ...] = ()
) -> CompactionPlan:
    decision = KeepDecision(length, np.asarray(kept, dtype=np.int32))
    return plan_round(decision, PAGES, 4, windows=windows, reserve=reserve, is_shared=lambda page: page in shared)


def pairs(moves: Moves) -> list[tuple[int, int]]:
    return [(source, moves.base + index) for index, source in enumerate(moves.sources.tolist())]


def test_sparse_survivors() -> None:
    """BR-050: moves 5>2, 9>3, 10>4; pages 3 > 2; the last page holds 1."""
    sparse = plan(11, [0, 1, 5, 9, 10])
    assert pairs(sparse.moves[None]) == [(5, 2), (9, 3), (10, 4)]
    assert (sparse.pages_kept, sparse.pages_freed) == ((7, 3), (9,))
    assert (sparse.kept_len, sparse.scrub) == (5, range(5, 8))
    sparse.check(nobody)


def test_dense_shift() -> None:
    """BR-050: the case that shows a wrong order."""
    dense = plan(5, [1, 2, 3, 4])
    assert pairs(dense.moves[None]) == [(1, 0), (2, 1), (3, 2), (4, 3)]
    assert (dense.pages_freed, dense.scrub) == ((3, 9), range(4, 4))


def test_keeping_all_moves_and_frees_nothing_that_is_in_use() -> None:
    identity = plan(11, list(range(11)), windows=(None, 6))
    assert [len(m.sources) for m in identity.moves.values()] == [0, 0]
    assert (identity.pages_freed, identity.scrub, identity.copies) == ((), range(11, 11), ())
    identity.check(nobody)


def test_an_identity_prefix_is_trimmed_and_nothing_else_is() -> None:
    tail_only = plan(11, [0, 1, 2, 10])
    assert pairs(tail_only.moves[None]) == [(10, 3)]
    prefix_only = plan(11, [0, 1, 2])
    assert pairs(prefix_only.moves[None]) == []
    assert (prefix_only.pages_freed, prefix_only.scrub) == ((3, 9), range(3, 4))
    prefix_only.check(nobody)


def test_pages_with_a_promise_stay() -> None:
    promised = plan(11, [0, 1, 5], reserve=9)
    assert (promised.pages_freed, promised.scrub) == ((), range(3, 4))
    assert plan(11, [0, 1, 5, 9], reserve=5).pages_freed == (9,)
    assert plan(11, [0, 1, 5, 9], reserve=40).pages_freed == ()


def test_the_newest_of_a_window_end_where_the_kept_end() -> None:
    rebased = plan(11, [0, 1, 5, 9, 10], windows=(None, 4))
    assert pairs(rebased.moves[4]) == [(7, 1), (8, 2), (9, 3), (10, 4)]
    assert pairs(rebased.moves[None]) == [(5, 2), (9, 3), (10, 4)]
    rebased.check(nobody)


def test_a_window_larger_than_what_is_kept_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"keeps 5 entries would cut the sliding window of 6"):
        plan(11, [0, 1, 5, 9, 10], windows=(None, 6))


def test_shared_pages_are_copied_only_where_something_is_or_will_be_written() -> None:
    assert plan(11, [0, 1, 2, 3, 6, 9], shared=(7, 3, 9)).copies == (1,)  # page 7 keeps its bytes, page 9 is only read
    assert plan(11, [0, 1, 5, 9, 10], shared=(7, 9)).copies == (0,)
    assert plan(11, [0, 1, 5, 9, 10], windows=(None, 4), shared=(7, 3)).copies == (0, 1)
    assert plan(11, [0, 1, 2, 3, 4], shared=(3,)).copies == (1,)  # nothing moves there, but its vacated cells are zeroed
    # Nothing of the round goes to page 3, and the next token does.
    assert plan(11, [0, 1, 2, 3], reserve=5, shared=(7, 3)).copies == (1,)
    assert plan(11, [0, 1, 2, 3], reserve=4, shared=(7, 3)).copies == ()
    copied = plan(11, [0, 1, 5, 9, 10], shared=(7,)).with_copies([PageId(5)])
    assert (copied.pages, copied.copies) == ((5, 3, 9), ())


LIES = {
    "overtaking": (
        {"moves": {None: Moves(3, np.asarray([2, 9], dtype=np.int32))}},
        r"move 0 to ordinal 3 would overtake its source 2",
    ),
    "descending": ({"moves": {None: Moves(2, np.asarray([5, 10, 9], dtype=np.int32))}}, "must strictly ascend"),
    "repeated": ({"moves": {None: Moves(2, np.asarray([5, 5, 9], dtype=np.int32))}}, "must strictly ascend"),
    "beyond": ({"moves": {None: Moves(2, np.asarray([5, 9, 11], dtype=np.int32))}}, r"in 0\.\.11, got 5\.\.11"),
    "short": ({"moves": {None: Moves(2, np.asarray([5, 9], dtype=np.int32))}}, "must end where the 5 kept entries end"),
    "negative": ({"moves": {None: Moves(-1, np.arange(6, dtype=np.int32))}}, "must end where the 5 kept entries end"),
    "grown": ({"kept": np.arange(12, dtype=np.int32)}, "12 of 11 entries"),
    "emptied": ({"kept": np.arange(0, dtype=np.int32)}, "0 of 11 entries"),
    "unmapped": ({"length": 13}, "5 of 13 entries on 3 pages of 4"),
    "cut": ({"num_pages_kept": 1}, "5 kept entries on 1 pages of 4"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_plan_outside_the_movers_contract_is_refused(lie: str) -> None:
    changes, match = LIES[lie]
    with pytest.raises(ValueError, match=match):
        replace(plan(11, [0, 1, 5, 9, 10]), **changes).check(nobody)


def test_a_destination_on_a_shared_page_is_refused_until_it_is_copied() -> None:
    sparse = plan(11, [0, 1, 5, 9, 10], shared=(3,))
    with pytest.raises(ValueError, match="page 3 at index 1 would be written to"):
        sparse.check(lambda page: page == 3)
    sparse.with_copies([PageId(4)]).check(lambda page: page == 3)
    sparse.check(lambda page: page == 9)  # only read

"""The plan of a round against the drawing in its module, and check() against plans that lie."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from runtime_service.compaction.decision import KeepDecision
from runtime_service.compaction.plan import CompactionPlan, plan_round
from shared.ids import PageId
from shared.kernels.compaction.modes import Mode, RowMode

PAGES = [PageId(7), PageId(3), PageId(9)]
HOLES = Mode.HOLE_FILLING


def nobody(page: PageId) -> bool:
    return False


def rows(*ordinals: list[int]) -> np.ndarray:
    return np.asarray(ordinals, dtype=np.int32)


def plan(
    length: int,
    *kept: list[int],
    mode: Mode = Mode.ORDERED,
    windows: tuple[int, ...] = (),
    reserve: int = 0,
    shared: tuple[int, ...] = (),
    tail: int = 0,
) -> CompactionPlan:
    """Of one row, or of one for each head."""
    decision = KeepDecision(length, rows(*kept), RowMode.UNION if len(kept) == 1 else RowMode.PER_HEAD)
    shares = set(shared).__contains__
    return plan_round(decision, PAGES, 4, mode=mode, windows=windows, reserve=reserve, is_shared=shares, tail=tail)


def moves(planned: CompactionPlan, row: int = 0) -> list[tuple[int, int]]:
    return [(source, ordinal) for ordinal, source in enumerate(planned.order[row].tolist()) if source != ordinal]


def test_sparse_survivors() -> None:
    """BR-050: moves 5>2, 9>3, 10>4; pages 3 > 2; the last page holds 1."""
    sparse = plan(11, [0, 1, 5, 9, 10])
    assert moves(sparse) == [(5, 2), (9, 3), (10, 4)]
    assert (sparse.pages_kept, sparse.pages_freed) == ((7, 3), (9,))
    assert (sparse.length, sparse.kept_len, sparse.base) == (11, 5, 2)
    sparse.check(nobody)


def test_dense_shift() -> None:
    """BR-050: the case that shows a wrong order."""
    dense = plan(5, [1, 2, 3, 4])
    assert moves(dense) == [(1, 0), (2, 1), (3, 2), (4, 3)]
    assert dense.pages_freed == (3, 9)


def test_the_drawing_of_both_modes() -> None:
    kept = [0, 2, 3, 9, 10]
    ordered, holes = plan(11, kept), plan(11, kept, mode=HOLES)
    assert moves(ordered) == [(2, 1), (3, 2), (9, 3), (10, 4)]
    assert moves(holes) == [(9, 1), (10, 4)]
    assert (ordered.pages_freed, holes.pages_freed) == ((9,), (9,))
    assert (ordered.base, holes.base) == (1, 1)
    assert holes.order.tolist() == [[0, 9, 2, 3, 10]]
    holes.check(nobody)


def test_holes_of_every_row_are_filled_from_its_own_survivors() -> None:
    both = plan(11, [0, 2, 3, 9, 10], [0, 1, 2, 3, 8], mode=HOLES)
    assert (moves(both, 0), moves(both, 1)) == ([(9, 1), (10, 4)], [(8, 4)])
    assert both.rewritten.tolist() == [1, 4]
    both.check(nobody)


@pytest.mark.parametrize("mode", Mode)
def test_keeping_all_moves_and_frees_nothing_that_is_in_use(mode: Mode) -> None:
    identity = plan(11, list(range(11)), mode=mode, windows=(6,) if mode is Mode.ORDERED else ())
    assert (moves(identity), identity.rewritten.tolist()) == ([], [])
    assert (identity.base, identity.kept_len) == (11, 11)
    assert (identity.pages_freed, identity.copies) == ((), ())
    identity.check(nobody)


def test_an_identity_prefix_is_trimmed_and_nothing_else_is() -> None:
    tail_only = plan(11, [0, 1, 2, 10])
    assert (moves(tail_only), tail_only.base) == ([(10, 3)], 3)
    prefix_only = plan(11, [0, 1, 2])
    assert (moves(prefix_only), prefix_only.base) == ([], 3)
    assert prefix_only.pages_freed == (3, 9)
    prefix_only.check(nobody)


def test_pages_with_a_promise_stay() -> None:
    assert plan(11, [0, 1, 5], reserve=9).pages_freed == ()
    assert plan(11, [0, 1, 5, 9], reserve=5).pages_freed == (9,)
    assert plan(11, [0, 1, 5, 9], reserve=40).pages_freed == ()


def test_pages_hold_the_tail_of_a_step_in_flight() -> None:
    assert plan(9, [0, 1, 5, 8], tail=0).pages_freed == (3, 9)
    with_tail = plan(9, [0, 1, 5, 8], tail=3)
    assert with_tail.pages_freed == (9,)
    with_tail.check(nobody)
    with pytest.raises(ValueError, match=r"11 \+ 2 entries do not fit on 3 pages of 4"):
        plan(11, [0, 1], tail=2).check(nobody)


def test_the_newest_of_a_window_end_where_the_kept_end() -> None:
    rebased = plan(11, [0, 1, 5, 9, 10], windows=(4,))
    assert (rebased.base, rebased.rewritten.tolist()) == (1, [1, 2, 3, 4])
    rebased.check(nobody)


def test_a_window_larger_than_what_is_kept_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"keeps 5 entries would cut the sliding window of 6"):
        plan(11, [0, 1, 5, 9, 10], windows=(3, 6)).check(nobody)


def test_shared_pages_are_copied_only_where_something_is_or_will_be_written() -> None:
    assert plan(11, [0, 1, 2, 3, 6, 9], shared=(7, 3, 9)).copies == (1,)  # page 7 keeps its bytes, page 9 is only read
    assert plan(11, [0, 1, 5, 9, 10], shared=(7, 9)).copies == (0,)
    assert plan(11, [0, 1, 5, 9, 10], windows=(4,), shared=(7, 3)).copies == (0, 1)
    assert plan(11, [0, 1, 2, 3, 4], shared=(3,)).copies == (1,)  # nothing moves there, but its vacated cells are zeroed
    # Nothing of the round goes to page 3, and the next token does.
    assert plan(11, [0, 1, 2, 3], reserve=5, shared=(7, 3)).copies == (1,)
    assert plan(11, [0, 1, 2, 3], reserve=4, shared=(7, 3)).copies == ()
    copied = plan(11, [0, 1, 5, 9, 10], shared=(7,)).with_copies([PageId(5)])
    assert (copied.pages, copied.copies) == ((5, 3, 9), ())


def test_a_page_without_a_hole_is_not_copied() -> None:
    """Ordered moves rewrite everything behind the first gap, hole filling only the holes."""
    kept = [0, 2, 3, 4, 5, 6, 7, 8, 9]  # page 7 has a hole, page 3 has none, page 9 is where the kept end
    assert plan(12, kept, shared=(7, 3, 9)).copies == (0, 1, 2)
    assert plan(12, kept, mode=HOLES, shared=(7, 3, 9)).copies == (0, 2)


KEPT = [0, 1, 5, 9, 10]
LIES = {
    "reversed": ({"order": rows([0, 1, 5, 10, 9])}, "ordered: what moves must be what is kept, once each"),
    "repeated": ({"order": rows([0, 1, 5, 5, 9])}, "must be what is kept, once each"),
    "lost": ({"order": rows([0, 1, 5, 9])}, "must be what is kept, once each"),
    "unmapped": ({"decision": KeepDecision(13, rows(KEPT))}, r"13 \+ 0 entries do not fit on 3 pages of 4"),
    "cut": ({"num_pages_kept": 1}, r"5 \+ 0 kept entries do not fit on 1 pages of 4"),
    "overtaking": (
        {"mode": HOLES, "order": rows([0, 5, 1, 9, 10])},
        r"filled from beyond the new length 5, got ordinal 1 for ordinal 2",
    ),
    "windowed": ({"mode": HOLES, "windows": (4,)}, r"layers with windows of \(4,\) see it"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_plan_outside_the_movers_contract_is_refused(lie: str) -> None:
    changes, match = LIES[lie]
    with pytest.raises(ValueError, match=match):
        replace(plan(11, KEPT), **changes).check(nobody)


def test_a_destination_on_a_shared_page_is_refused_until_it_is_copied() -> None:
    sparse = plan(11, KEPT, shared=(3,))
    with pytest.raises(ValueError, match="page 3 at index 1 would be written to"):
        sparse.check(lambda page: page == 3)
    sparse.with_copies([PageId(4)]).check(lambda page: page == 3)
    sparse.check(lambda page: page == 9)  # only read

"""Plans carried out cell by cell, in place, against a copy made before anything moved."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_service.compaction.decision import KeepDecision, keep_best
from runtime_service.compaction.plan import CompactionPlan, plan_round
from shared.ids import PageId

NUM_PAGES = 40
ZERO = "zero"


@dataclass
class Case:
    page_size: int
    pages: list[PageId]
    decision: KeepDecision
    window: int | None
    reserve: int
    shared: set[PageId]
    tile: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    page_size, length = draw(st.integers(1, 6)), draw(st.integers(1, 30))
    kept = sorted(draw(st.sets(st.integers(0, length - 1), min_size=1)))
    num_pages = -(-length // page_size) + draw(st.integers(0, 2))
    shuffled = np.random.default_rng(draw(st.integers(0, 99))).permutation(NUM_PAGES) + 1
    pages = [PageId(page) for page in shuffled[:num_pages].tolist()]
    return Case(
        page_size,
        pages,
        KeepDecision(length, np.asarray(kept, dtype=np.int32)),
        window=draw(st.none() | st.integers(1, len(kept))),
        reserve=draw(st.integers(0, 40)),
        shared=set(draw(st.lists(st.sampled_from(pages), max_size=3))),
        tile=draw(st.integers(1, 5)),
    )


def carry_out(plan: CompactionPlan, memory: dict[tuple[int, int], object], window: int | None, tile: int) -> None:
    """What a mover may do: forward, in place, a tile of loads before a tile of stores."""

    def cell(ordinal: int) -> tuple[int, int]:
        return plan.pages[ordinal // plan.page_size], ordinal % plan.page_size

    moves = plan.moves[window]
    for start in range(0, len(moves.sources), tile):
        loaded = [memory[cell(int(source))] for source in moves.sources[start : start + tile]]
        for index, value in enumerate(loaded, start):
            memory[cell(moves.base + index)] = value
    for ordinal in plan.scrub:
        memory[cell(ordinal)] = ZERO


@given(case=cases())
@settings(max_examples=400, deadline=None)
def test_a_plan_in_place_equals_a_gather_out_of_place(case: Case) -> None:
    """BR-050, BR-051, BR-061: any kept set, page size, tile and window; pages others read are never written."""
    length, kept = case.decision.length, case.decision.kept.tolist()
    windows = {None, case.window}
    plan = plan_round(
        case.decision, case.pages, case.page_size, windows=windows, reserve=case.reserve, is_shared=case.shared.__contains__
    )
    pristine = {(page, offset): (page, offset) for page in range(1, NUM_PAGES + 1) for offset in range(case.page_size)}
    copies = [PageId(100 + n) for n in range(len(plan.copies))]
    copied = {
        (copy, offset): pristine[case.pages[index], offset]
        for index, copy in zip(plan.copies, copies, strict=True)
        for offset in range(case.page_size)
    }
    plan = plan.with_copies(copies)
    plan.check(case.shared.__contains__)

    def cells(memory: dict[tuple[int, int], object], pages: Sequence[PageId], ordinals: Iterable[int]) -> list[object]:
        return [memory[pages[o // case.page_size], o % case.page_size] for o in ordinals]

    for window in windows:
        memory: dict[tuple[int, int], object] = pristine | copied
        carry_out(plan, memory, window, case.tile)
        survivors = kept if window is None or len(kept) == length else range(length - window, length)
        ends = range(len(kept) - len(survivors), len(kept))
        assert cells(memory, plan.pages, ends) == cells(pristine, case.pages, survivors)
        vacated = range(len(kept), min(length, -(-len(kept) // case.page_size) * case.page_size))
        assert set(cells(memory, plan.pages, vacated)) <= {ZERO}
        # Not one cell has changed of a page that another sequence reads or that is none of this one's.
        assert all(memory[cell] == cell for cell in pristine if cell[0] in case.shared or cell[0] not in case.pages)

    assert not set(plan.pages_kept[len(kept) // case.page_size :]) & case.shared  # the next tokens are written there
    assert plan.pages_kept + plan.pages_freed == plan.pages
    assert len(plan.pages_kept) == min(len(case.pages), -(-max(len(kept), case.reserve) // case.page_size))


@given(
    scores=st.lists(st.sampled_from([0.0, 1.0, 2.0, float("inf"), float("-inf")]), min_size=1, max_size=40),
    budget=st.integers(1, 45),
    data=st.data(),
)
@settings(max_examples=300, deadline=None)
def test_a_decision_is_the_sinks_and_the_best_of_the_rest_newest_first_among_equals(
    scores: list[float], budget: int, data: st.DataObject
) -> None:
    sinks = data.draw(st.integers(0, budget - 1))
    kept = keep_best(np.asarray(scores, dtype=np.float32), budget, sinks).kept.tolist()
    expected = set(range(min(sinks, len(scores))))
    for ordinal in sorted(range(len(scores)), key=lambda o: (scores[o], o), reverse=True):
        if len(expected | {ordinal}) <= budget:
            expected.add(ordinal)
    assert kept == sorted(expected)

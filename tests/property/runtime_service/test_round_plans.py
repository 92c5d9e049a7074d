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
from shared.kernels.compaction.modes import Mode, RowMode

NUM_PAGES = 40
ZERO = "zero"


@dataclass
class Case:
    page_size: int
    pages: list[PageId]
    decision: KeepDecision
    mode: Mode
    windows: tuple[int, ...]
    reserve: int
    shared: set[PageId]
    tile: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    page_size, length = draw(st.integers(1, 6)), draw(st.integers(1, 30))
    keep, num_rows = draw(st.integers(1, length)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kept = np.stack([np.sort(rng.choice(length, keep, replace=False)) for _ in range(num_rows)]).astype(np.int32)
    num_pages = -(-length // page_size) + draw(st.integers(0, 2))
    pages = [PageId(page) for page in (rng.permutation(NUM_PAGES) + 1)[:num_pages].tolist()]
    mode = draw(st.sampled_from(Mode))
    return Case(
        page_size,
        pages,
        KeepDecision(length, kept, RowMode.UNION if num_rows == 1 else RowMode.PER_HEAD),
        mode,
        windows=draw(st.just(()) | st.tuples(st.integers(1, keep))) if mode is Mode.ORDERED else (),
        reserve=draw(st.integers(0, 40)),
        shared=set(draw(st.lists(st.sampled_from(pages), max_size=3))),
        tile=draw(st.integers(1, 5)),
    )


Memory = dict[tuple[int, int], object]


def carry_out(plan: CompactionPlan, memory: Memory, moves: list[tuple[int, int]], tile: int) -> None:
    """What a mover may do: forward, in place, a tile of loads before a tile of stores, and zeros in what is vacated."""

    def cell(ordinal: int) -> tuple[int, int]:
        return plan.pages[ordinal // plan.page_size], ordinal % plan.page_size

    for start in range(0, len(moves), tile):
        loaded = [(memory[cell(source)], destination) for source, destination in moves[start : start + tile]]
        for value, destination in loaded:
            memory[cell(destination)] = value
    for ordinal in range(plan.kept_len, min(plan.length, -(-plan.kept_len // plan.page_size) * plan.page_size)):
        memory[cell(ordinal)] = ZERO


@given(case=cases())
@settings(max_examples=400, deadline=None)
def test_a_plan_in_place_equals_a_gather_out_of_place(case: Case) -> None:
    """BR-050, BR-051, BR-061: any kept set, page size, tile, mode and window; pages others read are never written."""
    length, keep = case.decision.length, case.decision.kept.shape[1]
    plan = plan_round(
        case.decision,
        case.pages,
        case.page_size,
        mode=case.mode,
        windows=case.windows,
        reserve=case.reserve,
        is_shared=case.shared.__contains__,
    )
    pristine: Memory = {(page, offset): (page, offset) for page in range(1, NUM_PAGES + 1) for offset in range(case.page_size)}
    copies = [PageId(100 + n) for n in range(len(plan.copies))]
    copied = {
        (copy, offset): pristine[case.pages[index], offset]
        for index, copy in zip(plan.copies, copies, strict=True)
        for offset in range(case.page_size)
    }
    plan = plan.with_copies(copies)
    plan.check(case.shared.__contains__)

    def cells(memory: Memory, pages: Sequence[PageId], ordinals: Iterable[int]) -> list[object]:
        return [memory[pages[o // case.page_size], o % case.page_size] for o in ordinals]

    def check(moves: list[tuple[int, int]], survivors: list[int]) -> None:
        memory: Memory = pristine | copied
        carry_out(plan, memory, moves, case.tile)
        ends = range(keep - len(survivors), keep)
        assert cells(memory, plan.pages, ends) == cells(pristine, case.pages, survivors)
        vacated = range(keep, min(length, -(-keep // case.page_size) * case.page_size))
        assert set(cells(memory, plan.pages, vacated)) <= {ZERO}
        # Not one cell has changed of a page that another sequence reads or that is none of this one's.
        assert all(memory[cell] == cell for cell in pristine if cell[0] in case.shared or cell[0] not in case.pages)

    for kept, order in zip(case.decision.kept.tolist(), plan.order.tolist(), strict=True):
        moves = [(source, ordinal) for ordinal, source in enumerate(order) if source != ordinal]
        check(moves, order)
        assert order == kept if case.mode is Mode.ORDERED else sorted(order) == kept
        # Hole filling moves what has no place any more and nothing else.
        assert case.mode is Mode.ORDERED or len(moves) == sum(ordinal >= keep for ordinal in kept)
    for window in case.windows if keep < length else ():
        check([(length - i, keep - i) for i in range(window, 0, -1)], list(range(length - window, length)))

    assert not set(plan.pages_kept[keep // case.page_size :]) & case.shared  # the next tokens are written there
    assert plan.pages_kept + plan.pages_freed == plan.pages
    assert len(plan.pages_kept) == min(len(case.pages), -(-max(keep, case.reserve) // case.page_size))


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
    positions = data.draw(st.permutations(range(len(scores))))
    ages = np.asarray([positions], dtype=np.int32)
    (kept,) = keep_best(np.asarray([scores], dtype=np.float32), ages, budget, sinks).kept.tolist()
    expected = set(range(min(sinks, len(scores))))
    for ordinal in sorted(range(len(scores)), key=lambda o: (scores[o], positions[o]), reverse=True):
        if len(expected | {ordinal}) <= budget:
            expected.add(ordinal)
    assert kept == sorted(expected)

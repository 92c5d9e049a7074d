"""Batches as launches over neighbouring slots: every row once, in order, nothing but its own slot."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime_service.engine.tensorrt.slots import SlotRun, slot_runs
from shared.errors import FieldOutOfRange


def test_a_batch_of_neighbours_is_one_launch_whatever_their_order() -> None:
    assert slot_runs([4, 2, 3], max_rows=8) == [SlotRun(2, (1, 2, 0))]


def test_a_gap_starts_another_launch() -> None:
    """Slot 3 is not in the batch: a launch over 2..5 would write to it."""
    assert slot_runs([4, 2], max_rows=8) == [SlotRun(2, (1,)), SlotRun(4, (0,))]


def test_padding_rows_are_not_launched() -> None:
    assert slot_runs([0, 1, 0], max_rows=8) == [SlotRun(1, (1,))]
    assert slot_runs([0, 0], max_rows=8) == []


def test_two_rows_of_one_slot_are_refused() -> None:
    with pytest.raises(FieldOutOfRange, match="slot 5"):
        slot_runs([5, 4, 5], max_rows=8)


@given(st.lists(st.integers(0, 40), max_size=20, unique_by=lambda slot: slot or object()), st.integers(1, 6))
def test_launches_cover_the_batch_exactly(slots: list[int], max_rows: int) -> None:
    runs = slot_runs(slots, max_rows)
    served = {row: run.first_slot + index for run in runs for index, row in enumerate(run.rows)}
    assert served == {row: slot for row, slot in enumerate(slots) if slot}
    assert all(1 <= len(run.rows) <= max_rows for run in runs)
    assert sum(len(run.rows) for run in runs) == len(served), "a row was launched twice"
    for before, after in pairwise(runs):
        end = before.first_slot + len(before.rows)
        assert end < after.first_slot or (end == after.first_slot and len(before.rows) == max_rows), "an avoidable launch"

"""The value check: every kind of bad value is found where it is, the first one is reported, and nothing moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from shared.kernels.compaction.check import Fault, FaultKind
from shared.kernels.compaction.inputs import RequestRound, RoundInputs
from shared.kernels.compaction.layout import CacheLayout, Family
from shared.kernels.compaction.modes import Mode, RowMode
from shared.kernels.compaction.movers import Mover
from shared.kernels.compaction.params import compact
from tests.support.compaction import catalogue
from tests.support.compaction.case import Case, GroupCase, Rig, differing_bytes

CPU = torch.device("cpu")
Spoil = Callable[[RoundInputs, CacheLayout], None]


def two_requests(mode: Mode = Mode.ORDERED) -> Case:
    """Per-head rows of 5 out of 30 in pages of 4, with a masked window of 3 beside them."""
    table, num_pages = catalogue.tables(2, 32, 4)
    window = GroupCase(table, num_pages, layers=(1,), family=Family.MASKED_WINDOW, window=3)
    kept = np.array([[2, 3, 11, 20, 29], [5, 6, 7, 8, 9]], dtype=np.int32)
    request = RequestRound(kept, 2, 30, tail=1)
    groups = (GroupCase(table, num_pages, mode=mode), window)
    return Case(4, groups, (request, request), row_mode=RowMode.PER_HEAD, keep_capacity=7, tail_capacity=2)


def fault_after(case: Case, spoil: Spoil, mover: Mover = Mover.CPU) -> Fault | None:
    """Stage a sound round, spoil it, run it; a fault must leave every byte alone."""
    rig = Rig(case, CPU)
    params = rig.build(mover, check_values=True)
    count = rig.inputs.stage(case.requests)
    spoil(rig.inputs, rig.layout)
    compact(params, count)
    fault = params.fault()
    if fault is not None:
        assert differing_bytes(rig.storages, Rig(case, CPU).storages) == 0
    return fault


def set_kept(request: int, row: int, index: int, value: int) -> Spoil:
    def spoil(inputs: RoundInputs, _: CacheLayout) -> None:
        inputs.kept[request, row, index] = value

    return spoil


def set_length(name: str, index: int, value: int) -> Spoil:
    def spoil(inputs: RoundInputs, _: CacheLayout) -> None:
        getattr(inputs, name)[index] = value

    return spoil


def set_page(request: int, entry: int, page: int) -> Spoil:
    def spoil(_: RoundInputs, layout: CacheLayout) -> None:
        layout.groups[0].block_table[request, entry] = page

    return spoil


def share_page(request: int, entry: int, other: int, other_entry: int) -> Spoil:
    def spoil(_: RoundInputs, layout: CacheLayout) -> None:
        for group in layout.groups:
            group.block_table[request, entry] = group.block_table[other, other_entry]

    return spoil


@pytest.mark.parametrize("mover", [Mover.REFERENCE, Mover.CPU])
@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (set_kept(1, 0, 3, 11), Fault(FaultKind.ORDER, 1, 0, 3)),  # BR-072: repeated
        (set_kept(0, 1, 2, 5), Fault(FaultKind.ORDER, 0, 1, 2)),  # BR-072: unsorted
        (set_kept(0, 0, 0, 1), Fault(FaultKind.OVERTAKE, 0, 0, 0)),
        (set_kept(1, 0, 4, 30), Fault(FaultKind.RANGE, 1, 0, 4)),
        (set_length("move_offsets", 0, 1), Fault(FaultKind.OFFSETS, 0, 0, 0)),
        (set_length("move_offsets", 2, 5), Fault(FaultKind.OFFSETS, 1, 0, 0)),
        (set_length("tail", 1, 3), Fault(FaultKind.COUNT, 1, 0, 0)),
        (set_length("tail", 0, -1), Fault(FaultKind.COUNT, 0, 0, 0)),
        (set_length("move_offsets", 2, 20), Fault(FaultKind.COUNT, 1, 0, 0)),
        (set_length("base", 1, -1), Fault(FaultKind.LENGTH, 1, 0, 0)),
        (set_length("valid_len", 0, 32), Fault(FaultKind.LENGTH, 0, 0, 0)),
        (set_length("valid_len", 1, 6), Fault(FaultKind.LENGTH, 1, 0, 0)),
        (set_page(1, 7, -1), Fault(FaultKind.UNMAPPED, 1, 0, 7)),  # the tail's source
        (set_page(0, 1, 99), Fault(FaultKind.UNMAPPED, 0, 0, 1)),  # a destination
        (share_page(1, 1, 0, 6), Fault(FaultKind.SHARED, 1, 0, 1)),
    ],
)
def test_each_fault_is_found_where_it_is(spoil: Spoil, expected: Fault, mover: Mover) -> None:
    assert fault_after(two_requests(), spoil, mover) == expected


def test_the_first_offender_is_reported() -> None:
    def spoil(inputs: RoundInputs, layout: CacheLayout) -> None:
        set_kept(1, 0, 1, 2)(inputs, layout)
        set_kept(0, 1, 4, 8)(inputs, layout)
        set_kept(0, 1, 3, 7)(inputs, layout)

    assert fault_after(two_requests(), spoil) == Fault(FaultKind.ORDER, 0, 1, 3)


def test_a_window_must_be_kept_whole() -> None:
    """Request 1 keeps 2 of a window of 3."""
    assert fault_after(two_requests(), set_length("move_offsets", 2, 9)) == Fault(FaultKind.WINDOW, 1, 0, 0)


def test_overtaking_by_one_is_found_although_a_tile_would_hide_it() -> None:
    """A copy that loads whole tiles gives the right answer for violations shorter than a tile; the check does not."""
    case = catalogue.dense(requests=(catalogue.union([5, 6, 7], base=5, valid_len=12),))
    assert fault_after(case, set_length("base", 0, 6)) == Fault(FaultKind.OVERTAKE, 0, 0, 0)


@pytest.mark.parametrize("mode", Mode)
def test_a_shared_page_that_only_identity_moves_touch_is_no_fault(mode: Mode) -> None:
    """Both requests keep the shared first page whole; nothing is written there."""
    table = np.array([[1, 2, 3], [1, 4, 5]], dtype=np.int32)
    requests = tuple(catalogue.union([0, 1, 2, 3, 6, 9], valid_len=12) for _ in range(2))
    case = Case(4, (GroupCase(table, 6, mode=mode),), requests)
    assert fault_after(case, lambda *_: None) is None
    evicting = replace(case, requests=tuple(catalogue.union([0, 1, 3, 4, 6, 9], valid_len=12) for _ in range(2)))
    assert fault_after(evicting, lambda *_: None) == Fault(FaultKind.SHARED, 0, 0, 0)


def test_hole_filling_may_leave_shared_pages_between_holes() -> None:
    """Ordered moves would write page 1; the holes lie on pages 0 and 2 only."""
    table = np.array([[1, 2, 3, 4], [5, 2, 6, 7]], dtype=np.int32)
    requests = (catalogue.union([0, 1, 2, 4, 5, 6, 7, 8, 9, 13], valid_len=16), catalogue.nothing())
    ordered = Case(4, (GroupCase(table, 8),), requests, keep_capacity=10)
    sound = fault_after(ordered.with_mode(Mode.HOLE_FILLING), lambda *_: None)
    assert sound is None, "request 1 has no moves, so nothing of it is known"
    active = replace(ordered, requests=(requests[0], catalogue.union(range(8), valid_len=8)))
    assert fault_after(active, lambda *_: None) == Fault(FaultKind.SHARED, 0, 0, 1)
    assert fault_after(active.with_mode(Mode.HOLE_FILLING), lambda *_: None) is None


def test_the_next_sound_round_moves_again() -> None:
    case = two_requests()
    rig = Rig(case, CPU)
    params = rig.build(Mover.CPU, check_values=True)
    count = rig.inputs.stage(case.requests)
    rig.inputs.kept[0, 0, 1] = 2
    compact(params, count)
    fault = params.fault()
    assert fault is not None
    assert str(fault) == "request 0, decision row 0, index 1: kept ordinals must strictly increase; nothing was moved"
    compact(params, rig.inputs.stage(case.requests))
    assert params.fault() is None
    assert differing_bytes(rig.storages, Rig(case, CPU).storages) > 0


def test_faults_of_rows_past_the_round_do_not_count() -> None:
    case = two_requests()
    rig = Rig(case, CPU)
    params = rig.build(Mover.CPU, check_values=True)
    rig.inputs.stage(case.requests)
    rig.inputs.kept[1, 0, 0] = -5
    compact(params, 1)
    assert params.fault() is None

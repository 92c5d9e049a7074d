"""The specification against answers derived in another way: by hand, and by gathering logical rows out of place."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from shared.kernels.compaction.inputs import RequestRound
from shared.kernels.compaction.layout import Family
from shared.kernels.compaction.modes import Mode, RowMode
from shared.kernels.compaction.movers import Mover
from shared.kernels.compaction.params import compact
from shared.kv_spec import DType, Layout
from tests.support.compaction import catalogue
from tests.support.compaction.case import Case, GroupCase, Rig, choose_kept

CPU = torch.device("cpu")


def logical_rows(rig: Rig, group: int, layer: int, request: int, head: int, draft: bool = False) -> torch.Tensor:
    """K and V bytes of every ordinal of a request, `[max_pages * page_size, 2, row_bytes]`, copied."""
    cache = rig.draft if draft else rig.layout
    assert cache is not None
    bound = cache.groups[group]
    pool = bound.pools[layer].view(torch.uint8)
    pool = pool if rig.case.layout is Layout.PAGED else pool.transpose(0, 1)
    pages = pool[bound.block_table[request].long(), :, head]
    return pages.transpose(1, 2).flatten(0, 1).clone()


def run_reference(case: Case) -> tuple[Rig, Rig]:
    """(before, after)."""
    before, after = Rig(case, CPU), Rig(case, CPU)
    compact(after.build(Mover.REFERENCE, check_values=True), after.inputs.stage(case.requests))
    return before, after


def values_after(
    kept: list[int], valid_len: int, page_size: int, mode: Mode = Mode.ORDERED, base: int = 0, tail: int = 0
) -> list[int]:
    """One head whose cell of ordinal n holds n (as int8), after a round, ordinals past the pages included."""
    max_pages = -(-(valid_len + tail) // page_size)
    table = np.arange(1, max_pages + 1, dtype=np.int32)[::-1][None].copy()
    group = GroupCase(table, max_pages + 1, kv_heads=1, head_dim=1, dtype=DType.INT8, mode=mode)
    case = Case(page_size, (group,), (RequestRound(np.array([kept], dtype=np.int32), base, valid_len, tail),))
    rig = Rig(case, CPU)
    pool = rig.layout.groups[0].pools[0]
    for ordinal in range(max_pages * page_size):
        pool[int(table[0, ordinal // page_size]), :, 0, ordinal % page_size] = ordinal
    compact(rig.build(Mover.REFERENCE), rig.inputs.stage(case.requests))
    rows = logical_rows(rig, 0, 0, 0, 0)
    assert torch.equal(rows[:, 0], rows[:, 1])
    return rows[:, 0, 0].tolist()


def test_br_050_sparse_keep() -> None:
    """BR-050: moves 5 > 2, 9 > 3, 10 > 4; the last kept page holds one entry."""
    assert values_after([0, 1, 5, 9, 10], 11, page_size=4)[:5] == [0, 1, 5, 9, 10]


def test_br_050_dense_shift() -> None:
    """BR-050: the shift by one that a descending copy turns into 4, 4, 4, 4."""
    assert values_after([1, 2, 3, 4], 5, page_size=4)[:4] == [1, 2, 3, 4]


def test_hole_filling_moves_only_what_lies_beyond() -> None:
    assert values_after([0, 2, 3, 4, 10], 11, page_size=4, mode=Mode.HOLE_FILLING)[:5] == [0, 10, 2, 3, 4]


def test_hole_filling_with_a_tail_on_top_of_survivors() -> None:
    """New length 4, tail 11 and 12 to cells 4 and 5: the survivors there leave for holes 1 and 2 first."""
    after = values_after([0, 3, 4, 5], 11, page_size=4, mode=Mode.HOLE_FILLING, tail=2)
    assert after[:6] == [0, 4, 5, 3, 11, 12]


@pytest.mark.parametrize("mode", Mode)
def test_br_050_random_keeps(mode: Mode) -> None:
    """BR-050: 200 random keep sets (two heads of 100 rounds) equal an out-of-place gather; hole filling as a set."""
    rng = np.random.default_rng(0)
    table, num_pages = catalogue.tables(1, 24, 4)
    for _ in range(100):
        base = int(rng.integers(0, 20))
        keep = int(rng.integers(0, 21 - base))
        request = RequestRound(choose_kept(rng, 2, keep, base, 20), base, 20, tail=2)
        case = Case(
            4, (GroupCase(table, num_pages, head_dim=4, mode=mode),), (request,), row_mode=RowMode.PER_HEAD, keep_capacity=20
        )
        before, after = run_reference(case)
        for head in range(2):
            old, new = logical_rows(before, 0, 0, 0, head), logical_rows(after, 0, 0, 0, head)
            survivors = torch.from_numpy(request.kept[head]).long()
            assert torch.equal(new[:base], old[:base])
            assert torch.equal(new[base + keep : base + keep + 2], old[20:22])
            placed = new[base : base + keep]
            if mode is Mode.ORDERED:
                assert torch.equal(placed, old[survivors])
            else:
                stayed = survivors[survivors < base + keep]
                assert torch.equal(new[stayed], old[stayed])
                assert sorted(map(bytes, placed.flatten(1).numpy())) == sorted(map(bytes, old[survivors].flatten(1).numpy()))


@pytest.mark.parametrize("row_mode", RowMode)
def test_seed_exact_selected_bytes_and_tail(row_mode: RowMode) -> None:
    """Seed test 1: prompt bytes stay, every (layer, head) holds its own kept entries and then the tail."""
    case = catalogue.seed_exact_bytes(row_mode)
    before, after = run_reference(case)
    for request, part in enumerate(case.requests):
        for layer in range(2):
            for head in range(2):
                row = {RowMode.UNION: 0, RowMode.PER_HEAD: head, RowMode.PER_LAYER_HEAD: layer * 2 + head}[row_mode]
                assert_packed(before, after, 0, layer, request, head, part.kept[row], part.base, part.valid_len, part.tail)


def test_seed_masked_window_and_tail_are_rebased() -> None:
    """Seed test 2: the dense layer keeps its set; the window of 2 lands at 4, so both end at 6, the tail behind."""
    case = catalogue.seed_masked_window()
    before, after = run_reference(case)
    for request, part in enumerate(case.requests):
        for head in range(2):
            assert_packed(before, after, 0, 0, request, head, part.kept[0], part.base, part.valid_len, part.tail)
            newest = np.arange(part.valid_len - 2, part.valid_len, dtype=np.int32)
            old, new = logical_rows(before, 1, 0, request, head), logical_rows(after, 1, 0, request, head)
            assert torch.equal(new[4 : 6 + part.tail], old[[*newest, *range(part.valid_len, part.valid_len + part.tail)]])
            assert torch.equal(new[:4], old[:4])


def test_seed_draft_follows_the_targets_decision() -> None:
    """Seed test 3: the target's ordinals over the draft's own heads, tables and tails; both caches checked."""
    case = catalogue.seed_draft()
    before, after = run_reference(case)
    for request, part in enumerate(case.requests):
        for head in range(2):
            assert_packed(before, after, 0, 1, request, head, part.kept[0], part.base, part.valid_len, part.tail)
        for head in range(4):
            assert_packed(before, after, 0, 0, request, head, part.kept[0], part.base, part.valid_len, part.draft_tail, draft=True)


def assert_packed(
    before: Rig,
    after: Rig,
    group: int,
    layer: int,
    request: int,
    head: int,
    kept: NDArray[np.int32],
    base: int,
    valid_len: int,
    tail: int,
    draft: bool = False,
) -> None:
    """The list is prompt, kept, tail; what lies behind is what lay there before."""
    old = logical_rows(before, group, layer, request, head, draft)
    order = [*range(base), *kept.tolist(), *range(valid_len, valid_len + tail)]
    expected = torch.cat([old[order], old[len(order) :]])
    assert torch.equal(logical_rows(after, group, layer, request, head, draft), expected)


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize(("tail", "zeros"), [(0, range(5, 8)), (2, range(7, 8)), (3, ())])
def test_scrub_zeroes_the_vacated_cells_of_the_last_page_only(mode: Mode, tail: int, zeros: range) -> None:
    """11 entries in pages of 4 shrink to 5: cells up to 8 become zeros, the released page keeps its bytes."""
    table, num_pages = catalogue.tables(1, 16, 4)
    request = RequestRound(np.array([[0, 1, 5, 9, 10]], dtype=np.int32), 0, 11, tail)
    case = Case(4, (GroupCase(table, num_pages, mode=mode),), (request,), scrub=True)
    before, after = run_reference(case)
    old, new = logical_rows(before, 0, 0, 0, 0), logical_rows(after, 0, 0, 0, 0)
    assert [cell for cell in range(16) if not new[cell].any()] == list(zeros)
    assert torch.equal(new[8:], old[8:])


def test_a_window_that_is_not_kept_whole_is_left_alone() -> None:
    """Unchecked device values must not drive a window's destination below the base."""
    table, num_pages = catalogue.tables(1, 16, 4)
    group = GroupCase(table, num_pages, family=Family.MASKED_WINDOW, window=3)
    case = Case(4, (group,), (catalogue.union([4, 5, 6], base=4, valid_len=11),))
    before, after = Rig(case, CPU), Rig(case, CPU)
    params = after.build(Mover.REFERENCE)
    count = after.inputs.stage(case.requests)
    after.inputs.move_offsets[1:] = 2
    compact(params, count)
    assert torch.equal(after.storages[0], before.storages[0])

"""Staging a round: what lands in the tensors, and what is refused before anything does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shared.kernels.compaction.inputs import RequestRound, RoundInputs, decision_rows
from shared.kernels.compaction.layout import CacheLayout, Family, PoolGroup
from shared.kernels.compaction.modes import RowMode
from shared.kv_spec import Layout


def layout_of(*heads: int, window: int | None = None) -> CacheLayout:
    """One group a head count, three request rows; optionally a masked window beside them."""
    table = torch.zeros(3, 4, dtype=torch.int32)
    groups = [PoolGroup((layer,), (torch.zeros(5, 2, count, 8, 4),), table) for layer, count in enumerate(heads)]
    if window is not None:
        groups.append(PoolGroup((len(heads),), (torch.zeros(5, 2, 1, 8, 4),), table, Family.MASKED_WINDOW, window))
    return CacheLayout(Layout.PAGED, tuple(groups))


def per_head(*rows: list[int], base: int = 0, valid_len: int = 20, tail: int = 0, draft_tail: int = 0) -> RequestRound:
    return RequestRound(np.array(rows, dtype=np.int32), base, valid_len, tail, draft_tail)


def test_staged_values() -> None:
    inputs = RoundInputs.allocate(layout_of(2), row_mode=RowMode.PER_HEAD, keep_capacity=5, tail_capacity=2)
    inputs.kept.fill_(99)
    count = inputs.stage([per_head([1, 4, 6], [2, 3, 5], base=1, valid_len=9, tail=2, draft_tail=1), per_head([7], [8], base=7)])
    assert count == 2
    assert inputs.kept[:2, :, :3].tolist() == [[[1, 4, 6], [2, 3, 5]], [[7, 0, 0], [8, 0, 0]]]
    assert inputs.move_offsets.tolist() == [0, 5, 6, 6], "rows past the requests repeat the last sum"
    assert inputs.tail[:2].tolist() == [2, 0]
    assert inputs.draft_tail[:2].tolist() == [1, 0]
    assert inputs.base[:2].tolist() == [1, 7]
    assert inputs.valid_len[:2].tolist() == [9, 20]


def test_an_empty_round_clears_the_offsets() -> None:
    inputs = RoundInputs.allocate(layout_of(1), row_mode=RowMode.UNION, keep_capacity=5)
    inputs.stage([per_head([1])])
    assert inputs.stage([]) == 0
    assert inputs.move_offsets.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("request_round", "message"),
    [
        (per_head([1], [2], [3]), r"requests\[1\].kept: expected shape \[2, at most 5\], got \[3, 1\]"),
        (per_head(list(range(6)), list(range(6))), r"requests\[1\].kept: expected shape \[2, at most 5\], got \[2, 6\]"),
        (per_head([1, 2, 3], [1, 2, 3], tail=3), r"requests\[1\].tail: expected 0\.\.2, got 3"),
        (per_head([1, 2, 3], [1, 2, 3], draft_tail=-1), r"requests\[1\].draft_tail: expected 0\.\.2, got -1"),
        (per_head([1, 2, 3], [1, 2, 3], base=-1), "got base -1, keep 3, valid_len 20"),
        (per_head([1, 2, 3], [1, 2, 3], base=18), "got base 18, keep 3, valid_len 20"),
        (per_head([1, 2], [1, 2]), r"requests\[1\].kept: expected at least the masked window of 3 entries, got 2"),
    ],
)
def test_refused_before_anything_is_written(request_round: RequestRound, message: str) -> None:
    inputs = RoundInputs.allocate(layout_of(2, window=3), row_mode=RowMode.PER_HEAD, keep_capacity=5, tail_capacity=2)
    with pytest.raises(ValueError, match=message):
        inputs.stage([per_head([1, 2, 3], [1, 2, 3]), request_round])
    assert not any(getattr(inputs, name).any() for name in ("kept", "move_offsets", "tail", "draft_tail", "base", "valid_len"))


def test_a_request_without_moves_need_not_keep_the_window() -> None:
    inputs = RoundInputs.allocate(layout_of(1, window=3), row_mode=RowMode.UNION, keep_capacity=5)
    assert inputs.stage([RequestRound(np.zeros((1, 0), dtype=np.int32), 0, 0)]) == 1


def test_too_many_requests() -> None:
    inputs = RoundInputs.allocate(layout_of(1), row_mode=RowMode.UNION, keep_capacity=5)
    with pytest.raises(ValueError, match="requests: expected at most 3, got 4"):
        inputs.stage([per_head([1])] * 4)


@pytest.mark.parametrize(("row_mode", "rows"), [(RowMode.UNION, 1), (RowMode.PER_HEAD, 2), (RowMode.PER_LAYER_HEAD, 6)])
def test_decision_rows(row_mode: RowMode, rows: int) -> None:
    """Windowed layers have none."""
    assert decision_rows(layout_of(2, 2, 2, window=3), row_mode) == rows


def test_per_head_rows_need_one_head_count() -> None:
    with pytest.raises(ValueError, match=r"one head count over all full-attention layers, got \[2, 4\]"):
        decision_rows(layout_of(2, 4), RowMode.PER_HEAD)
    assert decision_rows(layout_of(2, 4), RowMode.PER_LAYER_HEAD) == 6

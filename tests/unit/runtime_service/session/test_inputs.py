"""From a scheduled batch to the five tensors of an engine."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from runtime_service.core.batch import ScheduledBatch
from runtime_service.core.params import CompactionParams
from runtime_service.core.sequence import Sequence
from runtime_service.session.inputs import build_inputs
from shared.errors import InternalError
from shared.ids import PageId
from shared.kv_spec import DType, KVCacheSpec, LayerGroup, Layout
from tests.support.serving import request

GROUP = LayerGroup((0,), 1, 2, DType.FLOAT32)
SPEC = KVCacheSpec((GROUP,), Layout.PAGED, page_size=4, max_len=20)


def sequence(prompt: list[int], computed: int, pages: list[int], kept: list[int] | None = None) -> Sequence:
    made = Sequence(request(prompt, 50, compaction=CompactionParams("sink_recent", 8, 8)), 0, 0)
    made.hold(PageId(p) for p in pages)
    if computed:
        made.advance(computed)
    if kept is not None:
        made.compact(np.asarray([kept], dtype=np.int32), made.pages)
    return made


def test_positions_are_logical_and_starts_physical() -> None:
    """BR-085, BR-089: after rounds of different lengths each row has its own positions, as many as tokens."""
    fresh = sequence([11, 12, 13], 0, [5])
    going = sequence([21, 22, 23, 24, 25, 26, 27, 28], 5, [3, 7])
    compacted = sequence([30 + n for n in range(12)], 9, [2, 9, 4], kept=[0, 1, 7, 8])
    inputs = build_inputs(ScheduledBatch("prefill", 3, (fresh, going, compacted)), SPEC)
    assert inputs.profile == "prefill"
    assert inputs.input_ids.tolist() == [[11, 12, 13], [26, 27, 28], [39, 40, 41]]
    assert inputs.position_ids.tolist() == [[0, 1, 2], [5, 6, 7], [9, 10, 11]]
    assert inputs.write_start.tolist() == [0, 5, 4]
    assert inputs.last_index.tolist() == [2, 2, 2]
    assert inputs.block_table.tolist() == [[5, 0, 0, 0, 0], [3, 7, 0, 0, 0], [2, 9, 4, 0, 0]]
    for tensor in (inputs.input_ids, inputs.position_ids, inputs.write_start, inputs.last_index, inputs.block_table):
        assert tensor.dtype is torch.int32
        assert tensor.is_contiguous()


def test_a_linear_block_table_is_the_slot() -> None:
    linear = KVCacheSpec((GROUP,), Layout.LINEAR, page_size=20, max_len=20)
    inputs = build_inputs(ScheduledBatch("decode", 1, (sequence([1], 0, [6]), sequence([2], 0, [3]))), linear)
    assert inputs.block_table.tolist() == [[6], [3]]


def test_nothing_of_a_sequence_is_remembered_across_a_round() -> None:
    """The batch of the step before a round and the one behind it are the same; lengths and table are the new ones."""
    row = sequence([1] * 11, 9, [5, 6, 7])
    assert build_inputs(ScheduledBatch("prefill", 1, (row,)), SPEC).write_start.tolist() == [9]
    row.compact(np.asarray([[0, 8, 2]], dtype=np.int32), row.pages[:1])
    inputs = build_inputs(ScheduledBatch("prefill", 1, (row,)), SPEC)
    assert (inputs.write_start.tolist(), inputs.position_ids.tolist()) == ([3], [[9]])
    assert inputs.block_table.tolist() == [[5, 0, 0, 0, 0]]


def test_inputs_of_a_step_are_its_own() -> None:
    """BR-046: what the next step builds does not overwrite what this one still reads."""
    row = sequence([1, 2, 3, 4], 0, [5])
    first = build_inputs(ScheduledBatch("prefill", 2, (row,)), SPEC)
    row.advance(2)
    row.pages = [PageId(8)]
    build_inputs(ScheduledBatch("prefill", 2, (row,)), SPEC)
    assert (first.input_ids.tolist(), first.block_table.tolist()[0][0]) == ([[1, 2]], 5)


def test_tokens_without_a_cell_of_their_own_are_refused() -> None:
    """They would be written to the dump page, and lost."""
    with pytest.raises(InternalError, match="was scheduled 5 tokens; its pages hold 4 entries"):
        build_inputs(ScheduledBatch("prefill", 5, (sequence([1] * 6, 0, [5]),)), SPEC)

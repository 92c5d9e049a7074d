"""Rounds that fill holes, rows by head, cohorts of every kind: bytes and the map of entries on a real pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from runtime_service.core.evidence import CompactionEvidence
from runtime_service.core.params import CompactionParams
from shared.kernels.compaction import cpu
from shared.kernels.compaction.binding import BoundGroup
from shared.kernels.compaction.modes import Mode, RowMode
from shared.kv_spec import DType, LayerGroup
from tests.support.round_memory import COMPACTION, FULL, SLIDING, Memory, both_layouts
from tests.support.serving import request

HOLES = replace(COMPACTION, mode=Mode.HOLE_FILLING)
ALL_FULL = (replace(FULL, layers=(0, 1)), LayerGroup(layers=(2,), kv_heads=3, head_dim=2, dtype=DType.FLOAT32))


def test_holes_are_filled_with_fewer_moves_and_the_map_says_where_everything_is() -> None:
    """Over two rounds, with entries appended between them; nothing of anybody else's changes."""
    memory = Memory("paged", groups=ALL_FULL, compaction=HOLES)
    other, sequence = memory.sequence(7), memory.sequence(11)
    before = [memory.rows(sequence, layer) for layer in range(3)]
    theirs = [memory.rows(other, layer) for layer in range(3)]
    memory.policy.kept = [0, 2, 3, 9, 10]
    assert memory.compactor.run([sequence])
    assert sequence.positions.tolist() == [[0, 9, 2, 3, 10]]
    for layer in range(3):
        assert memory.rows(sequence, layer) == [before[layer][o] for o in (0, 9, 2, 3, 10)]
    moved = 2 * 2 * 2 + 2 * 3  # two survivors in two layers of two heads and in one of three
    bytes_moved = 2 * 2 * 2 * (2 * 4 * 4) + 2 * 3 * (2 * 2 * 4)
    assert sequence.evidence == CompactionEvidence(1, 6, moved, bytes_moved, 1, sequence.evidence.duration_s)

    for _ in range(3):
        sequence.advance(1)
        sequence.append(1)
    before = [memory.rows(sequence, layer) for layer in range(3)]
    memory.policy.kept = [1, 2, 5, 6, 7]
    memory.compactor.run([sequence])
    assert sequence.positions.tolist() == [[11, 9, 2, 12, 13]]
    assert [memory.rows(sequence, layer) for layer in range(3)] == [[rows[o] for o in (5, 1, 2, 6, 7)] for rows in before]
    assert [memory.rows(other, layer) for layer in range(3)] == theirs


def test_a_hole_is_filled_on_a_copy_of_a_page_that_another_sequence_reads() -> None:
    """Pages without a hole stay shared: they are not written to."""
    memory = Memory("paged", groups=ALL_FULL, compaction=replace(HOLES, budget=9, interval=3))
    parent = memory.sequence(12)
    fork = memory.sequence(12, pages=memory.allocator.share(parent.pages))
    before = [memory.rows(parent, layer) for layer in range(3)]
    memory.policy.kept = [0, 2, 3, 4, 5, 6, 7, 8, 9]
    memory.compactor.run([fork])
    assert fork.positions.tolist() == [[0, 9, 2, 3, 4, 5, 6, 7, 8]]
    assert [memory.rows(parent, layer) for layer in range(3)] == before
    for layer in range(3):
        assert memory.rows(fork, layer) == [before[layer][o] for o in fork.positions[0]]
    assert [page in parent.pages for page in fork.pages] == [False, True, False]


@pytest.mark.parametrize("mode", Mode)
@both_layouts
def test_heads_keep_entries_of_their_own(mode: Mode, layout: str) -> None:
    """A row for each head of each layer, in layers of different geometry."""
    memory = Memory(layout, groups=ALL_FULL, compaction=replace(COMPACTION, mode=mode))
    memory.policy.rows = RowMode.PER_LAYER_HEAD
    rng = np.random.default_rng(0)
    memory.policy.by_row = [sorted(rng.choice(11, 5, replace=False).tolist()) for _ in range(2 * 2 + 3)]
    sequence = memory.sequence(11)
    heads = [(layer, head) for layer, group in memory.spec.iter_layers() for head in range(group.kv_heads)]
    before = [memory.rows(sequence, *at) for at in heads]
    memory.compactor.run([sequence])
    assert sequence.positions.shape == (7, 5)
    assert np.sort(sequence.positions).tolist() == memory.policy.by_row
    assert [memory.rows(sequence, *at) for at in heads] == [
        [rows[position] for position in positions] for rows, positions in zip(before, sequence.positions.tolist(), strict=True)
    ]
    moved = (sequence.positions != np.arange(5)).sum(axis=1)
    assert sequence.evidence.rows_moved == moved.sum()
    assert sequence.evidence.bytes_moved == 2 * 4 * (4 * moved[:4].sum() + 2 * moved[4:].sum())


def test_a_row_by_head_is_shared_by_the_layers_and_windows_follow_none() -> None:
    memory = Memory("paged")
    memory.policy.rows, memory.policy.by_row = RowMode.PER_HEAD, [[0, 1, 5, 9, 10], [2, 3, 4, 6, 7]]
    sequence = memory.sequence(11)
    before = {(layer, head): memory.rows(sequence, layer, head) for layer in (0, 2) for head in range(2)}
    window = memory.rows(sequence, 1)
    memory.compactor.run([sequence])
    for (layer, head), rows in before.items():
        assert memory.rows(sequence, layer, head) == [rows[o] for o in memory.policy.by_row[head]]
    assert memory.rows(sequence, 1)[2:] == window[8:]
    assert sequence.evidence.rows_moved == 2 * (3 + 5) + 3 * 3


def test_a_cohort_of_every_kind_of_round_moves_together() -> None:
    memory = Memory("paged", num_pages=20, groups=ALL_FULL)
    for tensor in memory.pool.tensors:  # or the shortest keys of every head would be the first ones
        tensor.copy_(tensor.flatten()[torch.randperm(tensor.numel(), generator=torch.Generator().manual_seed(0))].view_as(tensor))
    ordered = memory.sequence(11)
    memory.compaction = HOLES
    holes = memory.sequence(11)
    memory.compaction = CompactionParams("knorm_per_layer_head", 5, 6, 0, Mode.HOLE_FILLING)
    by_head = memory.sequence(11)
    heads = [(layer, head) for layer, group in memory.spec.iter_layers() for head in range(group.kv_heads)]
    before = [[memory.rows(sequence, *at) for at in heads] for sequence in (ordered, holes, by_head)]
    assert memory.compactor.run([ordered, holes, by_head])
    for sequence, rows in zip((ordered, holes, by_head), before, strict=True):
        positions = np.broadcast_to(sequence.positions, (7, 5)).tolist()
        assert [memory.rows(sequence, *at) for at in heads] == [
            [of_head[position] for position in row] for of_head, row in zip(rows, positions, strict=True)
        ]
    assert ordered.positions.tolist() == [[0, 1, 5, 9, 10]]
    assert holes.positions.tolist() == [[0, 1, 5, 9, 10]]
    assert len({tuple(row) for row in by_head.positions.tolist()}) > 1


def test_what_a_request_prepares_is_what_its_rounds_use() -> None:
    """A budget over all that the cache holds, or one that is never outgrown, binds nothing again or at all."""
    memory = Memory("paged")
    bound = memory.compactor._executor._bound
    loaded = dict(bound)
    memory.compactor.prepare(request([1], 9, compaction=CompactionParams("knorm", 99, 6)))
    assert bound == loaded
    memory.compactor.prepare(memory.sequence(11).request)
    (first,) = bound.values()
    memory.compactor.run([memory.sequence(11)])
    assert list(bound.values()) == [first]
    for _ in range(2):
        largest = memory.compactor._executor.prepare(Mode.ORDERED, RowMode.UNION, 10**6)
    assert largest.inputs.keep_capacity == memory.spec.max_len
    assert memory.compactor._executor.prepare(Mode.ORDERED, RowMode.UNION, 10**6) is largest


def test_a_budget_larger_than_any_before_is_bound_anew() -> None:
    memory = Memory("paged", num_pages=30)
    memory.compactor.run([memory.sequence(11)])
    memory.compaction = CompactionParams("sink_recent", 20, 6, 4)
    long = memory.sequence(26)
    before = memory.rows(long, 2)
    memory.compactor.run([long])
    assert memory.rows(long, 2) == [before[o] for o in [*range(4), *range(10, 26)]]


@pytest.mark.parametrize(("groups", "modes"), [(ALL_FULL, list(Mode)), ((FULL, SLIDING), [Mode.ORDERED])], ids=["full", "windowed"])
def test_movers_are_compiled_before_the_first_round_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, groups: tuple[LayerGroup, ...], modes: list[Mode]
) -> None:
    """That takes seconds of a machine's first engine, and not of everybody's streams."""
    bound: list[Mode] = []
    bind = cpu.bind

    def recorded(groups: tuple[BoundGroup, ...], *rest: Any) -> Callable[[int], None]:
        bound.extend({group.mode for group in groups})
        return bind(groups, *rest)

    monkeypatch.setattr(cpu, "bind", recorded)
    Memory("paged", groups=groups)
    assert bound == modes

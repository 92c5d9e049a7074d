"""A round on a real pool: bytes, mapping, ownership and evidence, all or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from runtime_service.compaction import round as round_module
from runtime_service.compaction.executor import RoundExecutor
from runtime_service.compaction.plan import CompactionPlan, plan_round
from runtime_service.compaction.policy import KVView
from runtime_service.compaction.registry import POLICIES
from runtime_service.compaction.round import Compactor
from runtime_service.core.evidence import CompactionEvidence
from runtime_service.core.params import CompactionParams
from runtime_service.core.sequence import Sequence as KVSequence
from runtime_service.kv.allocator import PageAllocator
from runtime_service.kv.page_table import PageTable
from runtime_service.kv.pool import KVPool
from shared.ids import Ordinal, PageId
from shared.kernels.compaction.modes import Mode, RowMode
from shared.kv_spec import DType, KVCacheSpec, LayerGroup, Layout
from tests.support.serving import request

FULL = LayerGroup(layers=(0, 2), kv_heads=2, head_dim=4, dtype=DType.FLOAT32)
SLIDING = LayerGroup(layers=(1,), kv_heads=3, head_dim=2, dtype=DType.FLOAT32, window=3)
SPECS = {
    "paged": KVCacheSpec((FULL, SLIDING), Layout.PAGED, page_size=4, max_len=32),
    "linear": KVCacheSpec((FULL, SLIDING), Layout.LINEAR, page_size=32, max_len=32),
}
COMPACTION = CompactionParams("chosen", budget=5, interval=6, sinks=0)
both_layouts = pytest.mark.parametrize("layout", SPECS)


class Chosen:
    """Keeps the ordinals a test names; `by_row` where heads have rows of their own."""

    reads_keys = False

    def __init__(self) -> None:
        self.kept: list[int] = [0, 1, 5, 9, 10]
        self.rows = RowMode.UNION
        self.by_row: list[list[int]] = []

    def score(self, view: KVView) -> np.ndarray:
        chosen = [self.kept] if self.rows is RowMode.UNION else self.by_row
        return np.stack([np.isin(np.arange(view.length), kept) for kept in chosen]).astype(np.float32)


class Memory:
    """A pool whose every element is another number, and sequences on it."""

    def __init__(
        self,
        layout: str,
        num_pages: int = 12,
        groups: tuple[LayerGroup, ...] = (FULL, SLIDING),
        compaction: CompactionParams = COMPACTION,
    ) -> None:
        self.compaction = compaction
        self.spec = replace(SPECS[layout], groups=groups)
        self.pool = KVPool(self.spec, num_pages)
        for layer, tensor in enumerate(self.pool.tensors):
            tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) + 100_000 * (layer + 1))
        self.allocator = PageAllocator(num_pages)
        self.policy = Chosen()
        self.compactor = Compactor(self.pool, self.allocator, {"chosen": self.policy, **POLICIES}, max_sequences=3)

    def sequence(self, entries: int, *, pages: Sequence[PageId] | None = None) -> KVSequence:
        made = KVSequence(request([1] * entries, 50, compaction=self.compaction), 0, 0)
        made.start()
        made.hold(pages or self.allocator.try_allocate(self.spec.pages_for(entries)) or [])
        made.advance(entries)
        made.append(1)
        return made

    def rows(self, sequence: KVSequence, layer: int, head: int | None = None) -> list[list[float]]:
        """K and V of every entry, of all heads or one, in ordinal order."""
        table, pages = PageTable(sequence.pages, self.spec.page_size), self.pool.by_page(layer)
        cells = [table.locate(Ordinal(o)) for o in range(sequence.physical_len)]
        heads = slice(None) if head is None else slice(head, head + 1)
        return [pages[page, :, heads, offset].flatten().tolist() for page, offset in cells]

    def snapshot(self) -> list[torch.Tensor]:
        return [self.pool.by_page(layer).clone() for layer in range(self.spec.num_layers)]


@both_layouts
def test_survivors_move_bytes_and_positions_and_nothing_else_changes(layout: str) -> None:
    """BR-067, BR-050: keys are moved, never rotated again; another sequence's cells keep every byte."""
    memory = Memory(layout)
    other, sequence = memory.sequence(7), memory.sequence(11)
    before = [memory.rows(sequence, layer) for layer in range(3)]
    untouched = memory.snapshot()
    kept = memory.policy.kept

    assert memory.compactor.run([sequence])

    assert (sequence.positions.tolist(), sequence.physical_len, sequence.logical_len) == ([kept], 5, 12)
    for layer in (0, 2):
        assert memory.rows(sequence, layer) == [before[layer][o] for o in kept]
    assert memory.rows(sequence, 1)[2:] == before[1][8:]  # the newest three, where the full layers end
    for layer, old in enumerate(untouched):
        mine = torch.zeros(len(old), dtype=torch.bool)
        mine[sequence.pages] = True
        assert torch.equal(memory.pool.by_page(layer)[~mine], old[~mine])
    assert other.pages not in sequence.pages


@both_layouts
def test_vacated_cells_of_the_last_page_are_zero(layout: str) -> None:
    """Masked attention over NaN is NaN: what a round vacates must not lie in wait."""
    memory = Memory(layout)
    sequence = memory.sequence(11)
    for tensor in memory.pool.tensors:
        tensor[tensor % 7 == 3] = float("nan")
    memory.compactor.run([sequence])
    page, _ = PageTable(sequence.pages, memory.spec.page_size).locate(Ordinal(5))
    for layer in range(3):
        vacated = (
            memory.pool.by_page(layer)[page, :, :, 5 : min(11, memory.spec.page_size)]
            if layout == "linear"
            else (memory.pool.by_page(layer)[page, :, :, 1:4])
        )
        assert not vacated.any()


@both_layouts
def test_a_prefix_that_survives_as_it_is_still_has_its_tail_scrubbed(layout: str) -> None:
    memory = Memory(layout, groups=(replace(FULL, layers=(0, 1)),))
    memory.policy.kept = [0, 1, 2, 3, 4]
    sequence = memory.sequence(11)
    before = memory.rows(sequence, 1)
    memory.compactor.run([sequence])
    assert memory.rows(sequence, 1) == before[:5]
    page, offset = PageTable(sequence.pages, memory.spec.page_size).locate(Ordinal(5))
    end = min(offset + 6, memory.spec.page_size)
    assert not any(memory.pool.by_page(layer)[page, :, :, offset:end].any() for layer in range(2))


def test_tail_pages_come_back_and_serve_another_sequence_between_two_rounds() -> None:
    memory = Memory("paged", num_pages=4)
    sequence = memory.sequence(11)
    assert memory.allocator.num_free == 0
    memory.compactor.run([sequence])
    assert (len(sequence.pages), memory.allocator.num_free) == (2, 1)
    neighbour = memory.sequence(4)
    theirs = [memory.rows(neighbour, layer) for layer in range(3)]
    sequence.advance(1)
    sequence.append(1)
    sequence.advance(1)
    before = memory.rows(sequence, 0)
    memory.policy.kept = [0, 2, 3, 5, 6]
    sequence.append(1)
    memory.compactor.run([sequence])
    assert memory.rows(sequence, 0) == [before[o] for o in memory.policy.kept]
    assert sequence.positions.tolist() == [[0, 5, 9, 11, 12]]
    assert [memory.rows(neighbour, layer) for layer in range(3)] == theirs


def test_a_cohort_moves_together_and_evidence_adds_up() -> None:
    memory = Memory("paged")
    cohort = [memory.sequence(11), memory.sequence(9)]
    memory.policy.kept = [0, 1, 5, 7, 8]
    before = [memory.rows(sequence, 2) for sequence in cohort]
    ticks = iter([10.0, 14.0])
    memory.compactor._clock = lambda: next(ticks)
    memory.compactor.run(cohort)
    for sequence, rows in zip(cohort, before, strict=True):
        assert memory.rows(sequence, 2) == [rows[o] for o in memory.policy.kept]
    full, sliding = 2 * 2 * 3, 3 * 3  # two layers of two heads move three survivors, one of three heads its window
    bytes_moved = 2 * 3 * (2 * 2 * 4 * 4) + 3 * (2 * 3 * 2 * 4)
    first = CompactionEvidence(1, 6, full + sliding, bytes_moved, 1, 2.0)
    assert cohort[0].evidence == first
    assert cohort[1].evidence == CompactionEvidence(1, 4, full + sliding, bytes_moved, 1, 2.0)
    assert memory.compactor.evidence == first + cohort[1].evidence


def test_a_replayed_round_keeps_what_it_kept_whatever_the_policy_says_now() -> None:
    memory = Memory("paged")
    sequence = memory.sequence(11)
    memory.compactor.run([sequence])
    once = sequence.evidence
    memory.allocator.release(sequence.preempt())
    sequence.start()
    sequence.hold(memory.allocator.try_allocate(3) or [])
    sequence.advance(11)
    memory.policy.kept = [2, 3, 4, 6, 7]
    memory.compactor.run([sequence])
    assert sequence.positions.tolist() == [[0, 1, 5, 9, 10]]
    assert sequence.evidence == once
    assert memory.compactor.evidence.rounds == 2


def test_a_move_that_fails_leaves_every_mapping_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory("paged")
    cohort = [memory.sequence(11), memory.sequence(9)]
    shared = memory.allocator.share(cohort[0].pages)
    before = [(list(s.pages), s.positions.tolist(), s.rounds[:], memory.allocator.num_free) for s in cohort]

    def fail(executor: RoundExecutor, plans: Sequence[Sequence[CompactionPlan]]) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(RoundExecutor, "execute", fail)
    with pytest.raises(RuntimeError, match="device lost"):
        memory.compactor.run(cohort)
    assert [(s.pages, s.positions.tolist(), s.rounds, memory.allocator.num_free) for s in cohort] == before
    assert all(s.evidence == CompactionEvidence() for s in cohort)
    memory.allocator.release(shared)
    memory.allocator.check_integrity()


def test_a_plan_outside_the_movers_contract_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory("paged")
    sequence = memory.sequence(11)
    before = memory.snapshot()

    def lie(*args: object, **options: object) -> CompactionPlan:
        plan = plan_round(*args, **options)
        return replace(plan, order=plan.order[:, ::-1])

    monkeypatch.setattr(round_module, "plan_round", lie)
    with pytest.raises(ValueError, match="ordered: what moves must be what is kept"):
        memory.compactor.run([sequence])
    assert all(torch.equal(memory.pool.by_page(layer), old) for layer, old in enumerate(before))
    assert (sequence.physical_len, memory.allocator.num_used) == (11, 3)


def test_a_page_another_sequence_reads_is_copied_before_it_is_written() -> None:
    """BR-037."""
    memory = Memory("paged")
    parent = memory.sequence(11)
    fork = memory.sequence(11, pages=memory.allocator.share(parent.pages))
    before = [memory.rows(parent, layer) for layer in range(3)]
    free = memory.allocator.num_free

    assert memory.compactor.run([fork])

    assert [memory.rows(parent, layer) for layer in range(3)] == before
    assert memory.rows(fork, 0) == [before[0][o] for o in memory.policy.kept]
    assert not set(fork.pages) & set(parent.pages)
    assert memory.allocator.num_free == free - 2
    assert fork.evidence.pages_freed == 0  # the tail page is still the parent's
    memory.allocator.release(fork.finish())
    memory.allocator.release(parent.finish())
    memory.allocator.check_integrity()
    assert memory.allocator.num_used == 0


def test_without_a_page_for_the_copy_the_round_does_not_begin() -> None:
    """BR-038."""
    memory = Memory("paged", num_pages=5)
    parent = memory.sequence(11)
    fork = memory.sequence(11, pages=memory.allocator.share(parent.pages))
    before = memory.snapshot()
    assert not memory.compactor.run([fork])
    assert (fork.physical_len, fork.rounds, memory.allocator.num_free) == (11, [], 1)
    assert all(torch.equal(memory.pool.by_page(layer), old) for layer, old in enumerate(before))


def test_the_mover_sees_the_pages_of_this_round_and_none_of_an_earlier_one() -> None:
    """BR-062: host and device tables agree, unmapped entries included."""
    memory = Memory("paged")
    long, short = memory.sequence(11), memory.sequence(9)
    memory.compactor.run([long])
    memory.policy.kept = [0, 1, 2, 3, 8]
    memory.compactor.run([short])
    (table,) = memory.compactor._executor._tables
    assert table.shape == (3, 8)
    assert table[0].tolist()[3:] == [-1] * 5
    assert set(table[0].tolist()[:3]) >= set(short.pages)


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


def test_a_budget_larger_than_any_before_is_bound_anew() -> None:
    memory = Memory("paged", num_pages=30)
    memory.compactor.run([memory.sequence(11)])
    memory.compaction = CompactionParams("sink_recent", 20, 6, 4)
    long = memory.sequence(26)
    before = memory.rows(long, 2)
    memory.compactor.run([long])
    assert memory.rows(long, 2) == [before[o] for o in [*range(4), *range(10, 26)]]


class Gate:
    """A fence that passes when told to, or when somebody waits for it."""

    def __init__(self) -> None:
        self.open = self.waited = False

    def passed(self) -> bool:
        return self.open

    def wait(self) -> None:
        self.open = self.waited = True


def test_pages_of_a_round_in_flight_change_hands_behind_its_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freed by the round, or because one of its sequences is cancelled while the moves run; lengths are the new ones at once."""
    memory = Memory("paged", num_pages=8)
    gate = Gate()
    monkeypatch.setattr(memory.pool, "fence", lambda: gate)
    staying, leaving = memory.sequence(11), memory.sequence(11)
    memory.compactor.run([staying, leaving])
    assert (staying.physical_len, len(staying.pages), memory.allocator.num_free) == (5, 2, 3)
    memory.allocator.release(leaving.finish())
    assert memory.allocator.num_free == 5
    memory.allocator.check_integrity()

    (idle,) = memory.allocator.try_allocate(1) or []  # the one page no round has touched
    assert not gate.waited
    taken = memory.allocator.try_allocate(2) or []
    assert gate.waited
    assert len({idle, *taken}) == 3
    memory.allocator.check_integrity()


def test_copies_of_a_round_that_failed_are_held_back_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory("paged", num_pages=6)
    gate = Gate()
    monkeypatch.setattr(memory.pool, "fence", lambda: gate)
    parent = memory.sequence(11)
    fork = memory.sequence(11, pages=memory.allocator.share(parent.pages))

    def fail(executor: RoundExecutor, plans: Sequence[Sequence[CompactionPlan]]) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(RoundExecutor, "execute", fail)
    with pytest.raises(RuntimeError, match="device lost"):
        memory.compactor.run([fork])
    assert (memory.allocator.num_free, gate.waited) == (2, False)
    memory.allocator.try_allocate(2)
    assert gate.waited

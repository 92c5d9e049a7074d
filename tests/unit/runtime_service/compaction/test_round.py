"""A round on a real pool: bytes, mapping, ownership and evidence, all or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from runtime_service.compaction import round as round_module
from runtime_service.compaction.executor import RoundExecutor
from runtime_service.compaction.plan import CompactionPlan, plan_round
from runtime_service.compaction.round import RoundFailed
from runtime_service.core.evidence import CompactionEvidence
from runtime_service.kv.page_table import PageTable
from shared.ids import Ordinal
from tests.support.round_memory import FULL, Memory, both_layouts


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
    with pytest.raises(RoundFailed, match="device lost"):
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
    with pytest.raises(RoundFailed, match="ordered: what moves must be what is kept"):
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

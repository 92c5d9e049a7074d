"""Pages of a round whose moves are still running on a device."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from runtime_service.compaction.executor import RoundExecutor
from runtime_service.compaction.plan import CompactionPlan
from runtime_service.compaction.round import RoundFailed
from tests.support.fences import Gate
from tests.support.round_memory import Memory


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
    assert gate.waits == 0
    taken = memory.allocator.try_allocate(2) or []
    assert gate.waits == 1
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
    with pytest.raises(RoundFailed, match="device lost"):
        memory.compactor.run([fork])
    assert (memory.allocator.num_free, gate.waits) == (2, 0)
    memory.allocator.try_allocate(2)
    assert gate.waits == 1

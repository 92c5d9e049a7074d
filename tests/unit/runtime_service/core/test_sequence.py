"""Lengths, positions and the status machine of one sequence."""

from __future__ import annotations

import numpy as np
import pytest

from runtime_service.core.params import CompactionParams, SamplingParams, StopParams
from runtime_service.core.request import GenerationRequest
from runtime_service.core.sequence import Sequence, Status
from shared.ids import PageId, RequestId
from shared.kernels.compaction.modes import Mode


def make(prompt: int = 4, max_tokens: int = 100, compaction: CompactionParams | None = None, priority: int = 0) -> Sequence:
    request = GenerationRequest(
        request_id=RequestId("r"),
        engine="e",
        prompt_ids=tuple(range(prompt)),
        sampling=SamplingParams(temperature=0.0),
        stop=StopParams(max_tokens=max_tokens),
        compaction=compaction,
        priority=priority,
    )
    return Sequence(request, index=0, arrival=0)


def kept(*ordinals: int) -> np.ndarray:
    """In order, one row for all heads."""
    return np.asarray([ordinals], dtype=np.int32)


def run(sequence: Sequence, num_tokens: int) -> None:
    """Prefill what is known, then decode until `num_tokens` are computed."""
    while sequence.computed < num_tokens:
        if sequence.remaining == 0:
            sequence.append(7)
        sequence.advance(min(sequence.remaining, num_tokens - sequence.computed))


def test_counters_move_once_a_step_and_the_next_token_has_the_next_position() -> None:
    """BR-084."""
    sequence = make(prompt=4)
    assert (sequence.remaining, sequence.physical_len, sequence.room) == (4, 0, None)
    sequence.advance(3)
    assert (sequence.computed, sequence.positions.tolist()) == (3, [[0, 1, 2]])
    sequence.advance(1)
    sequence.append(9)
    assert (sequence.remaining, sequence.num_generated, sequence.logical_len) == (1, 1, 5)


def test_a_round_shrinks_the_physical_length_only() -> None:
    """BR-055, BR-066: 100 tokens, compact to 32, decode 3: KV length 33, 34, 35 and positions 100, 101, 102."""
    sequence = make(prompt=100)
    run(sequence, 100)
    sequence.compact(kept(*range(4), *range(72, 100)), sequence.pages)
    assert (sequence.physical_len, sequence.computed, sequence.logical_len) == (32, 100, 100)
    seen = []
    for _ in range(3):
        sequence.append(1)
        sequence.advance(1)
        seen.append((sequence.physical_len, sequence.positions[0, -1]))
    assert seen == [(33, 100), (34, 101), (35, 102)]
    assert sequence.positions[0, :5].tolist() == [0, 1, 2, 3, 72]


def test_a_round_that_fills_holes_leaves_a_map_that_is_no_longer_ascending() -> None:
    """What lies at an ordinal is known at every step, and what is decided next is decided about that."""
    sequence = make(prompt=8, compaction=CompactionParams("sink_recent", budget=5, interval=3, sinks=1, mode=Mode.HOLE_FILLING))
    run(sequence, 8)
    sequence.compact(kept(0, 6, 2, 7, 4), sequence.pages)
    assert sequence.positions.tolist() == [[0, 6, 2, 7, 4]]
    assert sequence.rounds[0].evicted.tolist() == [[1, 3, 5]]
    run(sequence, 11)
    sequence.compact(kept(0, 1, 6, 7, 5), sequence.pages)
    assert sequence.positions.tolist() == [[0, 6, 9, 10, 8]]
    assert sequence.rounds[1].evicted.tolist() == [[2, 3, 4]]


def test_heads_that_keep_entries_of_their_own_have_rows_of_their_own() -> None:
    sequence = make(prompt=6, compaction=CompactionParams("knorm_per_head", budget=4, interval=2, sinks=0))
    run(sequence, 6)
    assert sequence.positions.shape == (1, 6)
    sequence.compact(np.asarray([[0, 1, 2, 5], [2, 3, 4, 5]], dtype=np.int32), sequence.pages)
    run(sequence, 8)
    assert sequence.positions.tolist() == [[0, 1, 2, 5, 6, 7], [2, 3, 4, 5, 6, 7]]
    assert sequence.rounds[0].evicted.tolist() == [[3, 4], [0, 1]]
    sequence.compact(np.asarray([[0, 1, 4, 5], [2, 3, 4, 5]], dtype=np.int32), sequence.pages)
    assert sequence.positions.tolist() == [[0, 1, 6, 7], [4, 5, 6, 7]]


def test_room_ends_at_budget_plus_interval() -> None:
    sequence = make(prompt=20, compaction=CompactionParams("sink_recent", budget=8, interval=4, sinks=1))
    assert (sequence.request.max_physical, sequence.room, sequence.round_is_due) == (12, 12, False)
    sequence.advance(12)
    assert sequence.round_is_due
    sequence.compact(kept(0, *range(5, 12)), sequence.pages)
    assert (sequence.room, sequence.round_is_due) == (4, False)


def test_a_request_that_never_reaches_a_round_needs_no_more_than_its_tokens() -> None:
    sequence = make(prompt=5, max_tokens=3, compaction=CompactionParams("sink_recent", budget=80, interval=40))
    assert sequence.request.max_physical == 7  # the last sampled token is never written
    assert make(prompt=5, max_tokens=1).request.max_physical == 5


def test_preemption_forgets_the_cache_and_replays_the_same_rounds() -> None:
    sequence = make(prompt=10, compaction=CompactionParams("sink_recent", budget=4, interval=4, sinks=1))
    sequence.start()
    sequence.hold([PageId(3), PageId(5)])
    sequence.advance(8)
    sequence.compact(kept(0, 3, 6, 7), sequence.pages)
    sequence.advance(2)
    sequence.append(1)
    sequence.advance(1)
    sequence.compact(kept(0, 2, 5, 6), sequence.pages)  # under pressure, one entry before it was due
    held = sequence.positions.tolist()

    assert sequence.preempt() == [3, 5]
    assert (sequence.status, sequence.computed, sequence.positions.tolist(), sequence.pages) == (Status.WAITING, 0, [[]], [])
    assert (sequence.logical_len, sequence.remaining, sequence.preemptions) == (11, 11, 1)

    sequence.start()
    assert (sequence.room, sequence.is_replaying) == (8, True)
    sequence.advance(8)
    assert sequence.round_is_due
    assert sequence.remembered_round().tolist() == [[0, 3, 6, 7]]
    sequence.compact(sequence.remembered_round(), sequence.pages)
    assert (sequence.room, sequence.is_replaying) == (3, True)
    sequence.advance(3)
    sequence.compact(sequence.remembered_round(), sequence.pages)
    assert sequence.positions.tolist() == held
    assert (sequence.is_replaying, len(sequence.rounds), sequence.room) == (False, 2, 4)


def test_what_is_remembered_of_rounds_is_at_most_one_number_a_token() -> None:
    sequence = make(prompt=1, max_tokens=400, compaction=CompactionParams("sink_recent", budget=8, interval=4))
    while sequence.computed < 400:
        if sequence.remaining == 0:
            sequence.append(0)
        sequence.advance(1)
        if sequence.round_is_due:
            sequence.compact(kept(*range(4, 12)), sequence.pages)
    assert sum(r.evicted.size for r in sequence.rounds) == 400 - sequence.physical_len


def test_every_move_of_the_status_machine_is_allowed_once() -> None:
    sequence = make()
    with pytest.raises(AssertionError):
        sequence.preempt()
    sequence.start()
    with pytest.raises(AssertionError):
        sequence.start()
    sequence.hold([PageId(1)])
    assert sequence.finish() == [1]
    for move in (sequence.finish, sequence.start, sequence.preempt):
        with pytest.raises(AssertionError):
            move()


def test_higher_priority_then_earlier_arrival_ranks_first() -> None:
    early, late, urgent = make(), make(), make(priority=5)
    late.arrival, urgent.arrival = 1, 2
    assert sorted([late, urgent, early], key=lambda s: s.rank) == [urgent, early, late]


def test_its_last_token_may_arrive_while_it_is_computed_again() -> None:
    """It was sampled before a preemption, expected by no step, and pages came free again before it was seen."""
    sequence = make(prompt=4, max_tokens=3)
    sequence.start()
    run(sequence, 6)
    sequence.preempt()
    sequence.start()
    sequence.advance(5)
    sequence.append(9)
    assert sequence.tokens == [0, 1, 2, 3, 7, 7, 9]


def test_a_token_that_others_follow_comes_only_when_those_before_it_are_computed() -> None:
    sequence = make(prompt=4, max_tokens=4)
    sequence.start()
    run(sequence, 6)
    sequence.preempt()
    sequence.start()
    sequence.advance(5)
    with pytest.raises(AssertionError):
        sequence.append(9)

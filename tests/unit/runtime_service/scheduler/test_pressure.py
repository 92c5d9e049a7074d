"""What the scheduler does when no page is left: a round, a preemption, and the way back."""

from __future__ import annotations

import pytest

from runtime_service.core.batch import PressureRound
from runtime_service.core.params import CompactionParams
from runtime_service.core.sequence import Status
from tests.unit.runtime_service.scheduler.conftest import Bench


def rounds(budget: int, interval: int) -> CompactionParams:
    return CompactionParams("sink_recent", budget, interval, sinks=0)


def test_the_lowest_ranked_gives_way_and_comes_back_to_the_same_tokens(bench: type[Bench]) -> None:
    b = bench(6)
    old, young = b.add(prompt=7, max_tokens=16), b.add(prompt=7, max_tokens=16)
    while young.preemptions == 0:
        b.step()
    assert (old.preemptions, old.status) == (0, Status.RUNNING)
    assert (young.status, young.pages, young.computed) == (Status.WAITING, [], 0)
    kept = list(young.tokens)
    b.finish()
    assert young.tokens[: len(kept)] == kept
    assert young.num_generated == 16
    assert b.scheduler.num_preemptions == young.preemptions


def test_priority_outweighs_age_when_a_victim_is_chosen(bench: type[Bench]) -> None:
    b = bench(6)
    old, urgent = b.add(prompt=7, max_tokens=16), b.add(prompt=7, max_tokens=16, priority=1)
    b.finish()
    assert (old.preemptions > 0, urgent.preemptions) == (True, 0)


def test_a_preempted_sequence_returns_only_when_all_it_has_fits(bench: type[Bench]) -> None:
    """BR-115: prompt of 10 chunks, space for 6, two decoders: no endless resume and preempt, progress never falls back for long."""
    b = bench(24, profiles=("decode=4x1", "prefill=1x8"))
    first, second = b.add(prompt=4, max_tokens=40), b.add(prompt=4, max_tokens=40)
    b.step(), b.step()
    long = b.add(prompt=80, max_tokens=3)
    high_water, resumed = 0, 0
    for _ in range(200):
        before = long.status
        b.step()
        if before is Status.WAITING and long.status is Status.RUNNING:
            resumed += 1
            assert len(long.pages) * 4 >= long.logical_len
        high_water = max(high_water, long.computed)
    assert long.status is Status.FINISHED
    assert resumed <= 1 + long.preemptions
    assert high_water == 81  # with the step that ended it, 82
    assert {first.status, second.status} == {Status.FINISHED}


@pytest.mark.parametrize("num_pages", [8, 9, 10, 13])
def test_any_mix_of_requests_that_fit_alone_finishes(bench: type[Bench], num_pages: int) -> None:
    b = bench(num_pages)
    sequences = [b.add(prompt=1 + 5 * n % 23, max_tokens=1 + 7 * n % 9, priority=n % 3) for n in range(12)]
    b.finish()
    assert all(s.num_generated == s.request.stop.max_tokens for s in sequences)


def test_no_page_left_is_met_with_a_round_before_a_preemption(bench: type[Bench]) -> None:
    b = bench(8)
    compacting = b.add(prompt=6, max_tokens=60, compaction=rounds(4, 24))
    plain = b.add(prompt=6, max_tokens=14)
    pressed = []
    while plain.status is not Status.FINISHED:
        work = b.step()
        if isinstance(work, PressureRound):
            pressed.append(work.sequence)
    assert pressed
    assert set(pressed) == {compacting}
    assert b.scheduler.num_preemptions == 0
    assert compacting.rounds[0].at < 4 + 24


def test_the_round_that_frees_most_is_taken(bench: type[Bench]) -> None:
    b = bench(14)
    small = b.add(prompt=9, max_tokens=60, compaction=rounds(8, 40))
    large = b.add(prompt=21, max_tokens=60, compaction=rounds(4, 40))
    while not isinstance(work := b.step(), PressureRound):
        pass
    assert work.sequence is large
    assert small.rounds == []


def test_a_sequence_that_is_prefilling_is_not_pressed(bench: type[Bench]) -> None:
    """Its pages are promised to tokens it already has: a round would free none of them."""
    b = bench(9, profiles=("decode=4x1", "prefill=1x2"))
    decoder = b.add(prompt=2, max_tokens=30)
    b.step()
    prefilling = b.add(prompt=20, max_tokens=4, compaction=rounds(4, 16))
    while b.scheduler.num_preemptions == 0 and decoder.status is Status.RUNNING:
        if isinstance(work := b.step(), PressureRound):
            assert work.sequence.remaining == 1
    b.finish()
    assert prefilling.num_generated == 4


def test_a_decoder_without_a_page_yields_to_a_higher_ranked_prefill(bench: type[Bench]) -> None:
    """The only decoder preempts itself; the step then is the prefill's."""
    b = bench(9, profiles=("decode=4x1", "prefill=1x4"))
    low = b.add(prompt=4, max_tokens=30, priority=-1)
    for _ in range(4):
        b.step()
    high = b.add(prompt=24, max_tokens=6)
    assert low.status is Status.RUNNING
    b.step()
    while low.preemptions == 0:
        b.step()
        assert high.status is Status.RUNNING
    b.finish()
    assert low.num_generated == 30


def test_a_preempted_sequence_with_rounds_replays_them(bench: type[Bench]) -> None:
    b = bench(8)
    b.add(prompt=6, max_tokens=25)
    compacting = b.add(prompt=30, max_tokens=40, compaction=rounds(8, 4))
    while compacting.preemptions == 0:
        b.step()
    remembered = [(r.at, r.evicted.tolist()) for r in compacting.rounds]
    assert remembered
    b.finish()
    assert [(r.at, r.evicted.tolist()) for r in compacting.rounds][: len(remembered)] == remembered
    assert sum(r.evicted.size for r in compacting.rounds) == compacting.rounds[-1].at - 8

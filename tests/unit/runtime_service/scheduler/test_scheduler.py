"""Who takes the next step, on whose pages."""

from __future__ import annotations

import pytest

from runtime_service.core.batch import ScheduledBatch
from runtime_service.core.params import CompactionParams
from runtime_service.core.sequence import Sequence, Status
from shared.kv_spec import Layout
from tests.unit.runtime_service.scheduler.conftest import Bench


def rounds(budget: int, interval: int) -> CompactionParams:
    return CompactionParams("sink_recent", budget, interval, sinks=0)


def batch(work: object) -> ScheduledBatch:
    assert isinstance(work, ScheduledBatch), work
    return work


def test_an_idle_scheduler_has_nothing_to_do(bench: type[Bench]) -> None:
    assert bench(8).step() is None


def test_a_prompt_is_prefilled_in_chunks_then_decoded_one_by_one(bench: type[Bench]) -> None:
    b = bench(20)
    sequence = b.add(prompt=19, max_tokens=3)
    steps = [batch(b.step()) for _ in range(5)]
    assert [(s.profile, s.query_len) for s in steps] == [
        ("prefill", 8),
        ("prefill", 8),
        ("prefill", 3),
        ("decode", 1),
        ("decode", 1),
    ]
    assert sequence.status is Status.FINISHED
    assert b.step() is None


def test_a_one_token_prompt_is_a_decode_step(bench: type[Bench]) -> None:
    b = bench(20)
    b.add(prompt=1)
    assert batch(b.step()).profile == "decode"


def test_prefill_and_decode_take_turns(bench: type[Bench]) -> None:
    b = bench(60)
    b.add(prompt=8)
    b.step()
    b.add(prompt=32)
    assert [batch(b.step()).profile for _ in range(9)] == ["decode", "prefill"] * 4 + ["decode"]


def test_rows_of_a_prefill_are_equally_long(bench: type[Bench]) -> None:
    """Those that can take the leader's chunk ride along; shorter ones wait for their own turn."""
    b = bench(60)
    leader, short, long = b.add(prompt=5), b.add(prompt=3), b.add(prompt=30)
    first = batch(b.step())
    assert (first.query_len, first.sequences) == (5, (leader, long))
    assert batch(b.step()).profile == "decode"
    third = batch(b.step())
    assert (third.query_len, third.sequences) == (3, (short, long))


def test_a_batch_is_never_larger_than_its_profile(bench: type[Bench]) -> None:
    b = bench(100)
    for _ in range(9):
        b.add(prompt=4, max_tokens=9)
    while (work := b.step()) is not None:
        assert len(batch(work).sequences) <= {"prefill": 2, "decode": 4}[batch(work).profile]
        assert len(b.scheduler.running) <= 4


def test_a_chunk_ends_where_a_round_must_run(bench: type[Bench]) -> None:
    b = bench(20)
    sequence = b.add(prompt=40, compaction=rounds(6, 5))
    lengths = []
    while sequence.remaining > 1:
        lengths.append(batch(b.step()).query_len)
        assert sequence.physical_len <= 11
    assert lengths == [8, 3, 5, 5, 5, 5, 5, 4]


def test_pages_for_the_whole_prompt_are_taken_at_admission(bench: type[Bench]) -> None:
    """BR-124: a prompt that fits is not robbed by decodes while it is being prefilled in chunks."""
    b = bench(12)
    decoder = b.add(prompt=4, max_tokens=9)
    b.step()
    prompt = b.add(prompt=36, max_tokens=1)
    seen = []
    while prompt.status is not Status.FINISHED:
        b.step()
        seen.append(len(prompt.pages))
    assert set(seen[:-1]) == {9}
    assert len(decoder.pages) == 3  # it went on growing meanwhile
    assert b.scheduler.num_preemptions == 0


def test_admission_leaves_a_page_for_each_running_sequence_to_grow(bench: type[Bench]) -> None:
    b = bench(10)
    b.add(prompt=4, max_tokens=20)
    b.step()
    newcomer = b.add(prompt=36)
    b.step()
    assert newcomer.status is Status.WAITING  # 9 pages are free, 1 of them spoken for
    assert newcomer.preemptions == 0
    smaller = bench(11)
    smaller.add(prompt=4, max_tokens=20)
    smaller.step()
    fits = smaller.add(prompt=36)
    smaller.step()
    assert fits.status is Status.RUNNING


def test_nobody_overtakes_a_head_that_does_not_fit_yet(bench: type[Bench]) -> None:
    b = bench(10)
    b.add(prompt=20, max_tokens=8)
    b.step()
    large, small = b.add(prompt=30, max_tokens=2), b.add(prompt=2, max_tokens=2)
    while large.status is Status.WAITING:
        assert small.status is Status.WAITING
        b.step()
    b.finish()


def test_higher_priority_is_admitted_first(bench: type[Bench]) -> None:
    b = bench(10)
    b.add(prompt=30, max_tokens=3)
    b.step()
    low, high = b.add(prompt=30, max_tokens=2), b.add(prompt=30, max_tokens=2, priority=1)
    while high.status is Status.WAITING:
        b.step()
    assert low.status is Status.WAITING
    b.finish()


@pytest.mark.parametrize("status", list(Status))
def test_release_is_idempotent_from_every_status(bench: type[Bench], status: Status) -> None:
    """BR-118: nothing held, something held, nothing left."""
    b = bench(6)
    sequence = b.add(prompt=6, max_tokens=1 if status is Status.FINISHED else 9)
    if status is not Status.WAITING:
        b.step()
    assert sequence.status is status
    for _ in range(3):
        b.scheduler.release(sequence)
        assert sequence.status is Status.FINISHED
        assert (b.allocator.num_free, len(b.scheduler.waiting), b.scheduler.running) == (6, 0, [])


def test_pages_go_back_by_ownership_not_by_tokens(bench: type[Bench]) -> None:
    """BR-034: page size 1, a pool of 9; a step has written its entry and the sampled token was never appended."""
    b = bench(9, page_size=1)
    sequence = b.add(prompt=5)
    work = b.scheduler.schedule()
    assert isinstance(work, ScheduledBatch)
    sequence.advance(work.query_len)
    b.scheduler.release(sequence)
    assert b.allocator.num_free == 9


def test_the_linear_layout_is_a_slot_for_each_sequence(bench: type[Bench]) -> None:
    b = bench(2, layout=Layout.LINEAR, max_len=32)
    sequences = [b.add(prompt=10, max_tokens=23), b.add(prompt=3, max_tokens=20), b.add(prompt=10, max_tokens=5)]
    b.step()
    assert [s.status for s in sequences] == [Status.RUNNING, Status.RUNNING, Status.WAITING]
    assert [len(s.pages) for s in sequences] == [1, 1, 0]
    b.finish()
    assert b.scheduler.num_preemptions == 0


def test_a_linear_sequence_goes_on_past_its_slot_with_rounds(bench: type[Bench]) -> None:
    b = bench(1, layout=Layout.LINEAR, max_len=32)
    sequence: Sequence = b.add(prompt=50, max_tokens=200, compaction=rounds(20, 12))
    b.finish()
    assert (sequence.num_generated, len(sequence.rounds)) == (200, (249 - 20) // 12)


def sibling(b: Bench, parent: Sequence) -> Sequence:
    """Another sample of the parent's request, not in the queue."""
    return Sequence(parent.request, 1, next(b.arrivals))


@pytest.mark.parametrize(("prompt", "shared"), [(6, 1), (8, 2), (3, 0)])
def test_a_fork_shares_full_pages_and_owns_the_one_it_writes(bench: type[Bench], prompt: int, shared: int) -> None:
    b = bench(20)
    parent = b.add(prompt=prompt, max_tokens=9)
    b.scheduler.schedule()
    parent.advance(prompt)
    child = sibling(b, parent)
    copies = b.scheduler.fork(parent, child)
    assert child.pages[:shared] == parent.pages[:shared]
    assert not set(child.pages[shared:]) & set(parent.pages)
    assert copies == list(zip(parent.pages[shared:], child.pages[shared:], strict=True))
    assert (child.status, child.computed) == (Status.RUNNING, prompt)
    assert child.positions.tolist() == parent.positions.tolist()
    for sequence in (parent, child):
        sequence.append(1)
    b.finish()


@pytest.mark.parametrize("num_pages", [5, 6])
def test_a_fork_takes_all_it_needs_or_nothing(bench: type[Bench], num_pages: int) -> None:
    """BR-038: a prompt of 3 pages; the parent's growth is spoken for, then one page for each child's own tail."""
    b = bench(num_pages)
    parent = b.add(prompt=10, max_tokens=9)
    b.scheduler.schedule()
    parent.advance(10)
    children = [sibling(b, parent) for _ in range(3)]
    made = [b.scheduler.fork(parent, child) is not None for child in children]
    assert made == [True, False, False]
    assert [child.status for child in children] == [Status.RUNNING, Status.WAITING, Status.WAITING]
    assert b.allocator.num_free == num_pages - 4
    for sequence in (parent, children[0]):
        sequence.append(1)
    for child in children[1:]:
        b.scheduler.add(child)
    b.finish()


def test_a_fork_waits_for_a_place_in_the_batch(bench: type[Bench]) -> None:
    b = bench(60, profiles=("decode=2x1", "prefill=2x8"))
    parent, other = b.add(prompt=4), b.add(prompt=4)
    b.scheduler.schedule()
    parent.advance(4)
    assert b.scheduler.fork(parent, sibling(b, parent)) is None
    b.scheduler.release(other)
    assert b.scheduler.fork(parent, sibling(b, parent)) == []


def test_a_hit_takes_of_what_is_free_only_what_nobody_owns(bench: type[Bench]) -> None:
    """12 pages: the first holds 4 and may grow by one, so 7 are left; the second needs 10, of which it shares 4."""
    shared = bench(12, prefix_caching=True)
    first = shared.add(16, max_tokens=4)
    shared.step()
    shared.step()
    assert (first.computed, len(first.pages)) == (16, 4)
    second = shared.add(40, max_tokens=2)
    shared.step()
    assert second.status is Status.RUNNING
    assert second.pages[:4] == first.pages[:4]
    assert second.reused == 16
    shared.finish()
    assert (shared.allocator.num_free, shared.allocator.num_cached) == (12, 10)


def test_a_head_that_a_hit_does_not_make_fit_waits_and_takes_nothing(bench: type[Bench]) -> None:
    """Idle pages that it would wake are free already: they are not counted twice."""
    short = bench(12, prefix_caching=True)
    short.add(16, max_tokens=1)
    short.finish()
    assert short.allocator.num_cached == 4
    holder = short.add(4, max_tokens=30)
    short.step()
    long = short.add(44, max_tokens=1)
    short.step()
    assert (long.status, short.allocator.num_cached) == (Status.WAITING, 4)
    assert holder.status is Status.RUNNING
    short.finish()

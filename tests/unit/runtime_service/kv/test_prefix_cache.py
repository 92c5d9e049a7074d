"""How much of a sequence is found, and what it leaves to be found."""

from __future__ import annotations

import numpy as np
import pytest

from runtime_service.core.params import CompactionParams
from runtime_service.core.sequence import Sequence
from runtime_service.kv.allocator import PageAllocator
from runtime_service.kv.prefix_cache import PrefixCache
from shared.ids import PageId
from tests.support.serving import request

PAGE = 16


class Bench:
    def __init__(self, *, enabled: bool = True) -> None:
        self.allocator = PageAllocator(40)
        self.prefixes = PrefixCache(self.allocator, PAGE, enabled=enabled)

    def compute(self, prompt: list[int] | range, *, more: int = 0, **options: object) -> Sequence:
        """A sequence that has computed its prompt and `more` tokens, published what it may, and still owns its pages."""
        sequence = Sequence(request(prompt, 100, **options), 0, 0)
        sequence.start()
        sequence.hold(self.allocator.try_allocate(-(-(len(prompt) + more) // PAGE)) or [])
        sequence.advance(len(prompt))
        for _ in range(more):
            sequence.append(7)
            sequence.advance(1)
        self.prefixes.publish(sequence)
        return sequence

    def find(self, prompt: list[int] | range, **options: object) -> list[PageId]:
        return self.prefixes.find(Sequence(request(prompt, 100, **options), 0, 1))


@pytest.mark.parametrize(("length", "num_pages"), [(15, 0), (16, 0), (17, 1), (31, 1), (32, 1), (33, 2), (48, 2), (70, 3)])
def test_at_least_the_last_token_is_left_to_compute(length: int, num_pages: int) -> None:
    """BR-042."""
    bench = Bench()
    owner = bench.compute(range(50))
    assert bench.find(range(length)) == owner.pages[:num_pages]


def test_generated_tokens_are_found_too_and_unseen_ones_when_the_host_has_seen_them() -> None:
    bench = Bench()
    owner = bench.compute(range(20), more=11)
    conversation = [*range(20), *[7] * 12, 1]
    assert bench.find(conversation) == owner.pages[:1]
    owner.expect()  # the 32nd token
    owner.advance(1)
    bench.prefixes.publish(owner)
    assert bench.find(conversation) == owner.pages[:1]
    owner.append(7)
    bench.prefixes.publish(owner)
    assert bench.find(conversation) == owner.pages[:2]


def test_salts_do_not_meet() -> None:
    bench = Bench()
    owner = bench.compute(range(40), cache_salt="a")
    assert bench.find(range(40)) == bench.find(range(40), cache_salt="b") == []
    assert bench.find(range(40), cache_salt="a") == owner.pages[:2]


def test_a_token_is_left_to_bring_a_round_about() -> None:
    bench = Bench()
    owner = bench.compute(range(60))
    assert bench.find(range(60), compaction=CompactionParams("sink_recent", 20, 12)) == owner.pages[:1]
    assert bench.find(range(60), compaction=CompactionParams("sink_recent", 20, 13)) == owner.pages[:2]


def test_what_a_round_has_touched_is_not_published() -> None:
    bench = Bench()
    compaction = CompactionParams("sink_recent", 20, 12)
    owner = bench.compute(range(17), compaction=compaction)
    owner.compact(np.arange(17, dtype=np.int32)[None], owner.pages)
    for _ in range(15):
        owner.append(7)
        owner.advance(1)
        bench.prefixes.publish(owner)
    assert owner.computed == 32
    assert bench.find([*range(17), *[7] * 16]) == owner.pages[:1]


def test_a_sequence_computed_again_goes_on_up_to_its_first_round() -> None:
    bench = Bench()
    compaction = CompactionParams("sink_recent", 30, 9)
    owner = bench.compute(range(40), compaction=compaction)
    early = np.arange(30, dtype=np.int32)[None]
    again = Sequence(owner.request, 0, 1)
    again.start()
    again.hold(bench.allocator.try_allocate(3) or [])
    again.advance(32)
    again.compact(early, again.pages)
    bench.allocator.release(again.preempt())
    assert bench.prefixes.find(again) == owner.pages[:1]  # the round of then comes at 32


def test_two_that_computed_the_same_publish_one_chain() -> None:
    bench = Bench()
    one, other = bench.compute(range(20)), bench.compute([*range(20), *range(90, 110)])
    assert bench.find([*range(20), *range(90, 110)]) == [one.pages[0], other.pages[1]]
    bench.allocator.release(one.finish())
    bench.prefixes.forget(one)
    while bench.find(range(20)):
        assert bench.allocator.try_allocate(1)
    assert bench.find([*range(20), *range(90, 110)]) == []
    other.append(1)
    for _ in range(8):  # it publishes its own pages when it fills another
        other.advance(1)
        other.append(1)
        bench.prefixes.publish(other)
    assert bench.find([*range(20), *range(90, 110)]) == other.pages[:2]
    bench.allocator.check_integrity()


def test_turned_off_it_keeps_nothing() -> None:
    bench = Bench(enabled=False)
    owner = bench.compute(range(40))
    assert bench.find(range(40)) == []
    bench.allocator.release(owner.finish())
    assert bench.allocator.num_cached == 0

"""What fits and what is refused, with the numbers."""

from __future__ import annotations

import pytest

from runtime_service.core.params import CompactionParams
from runtime_service.core.request import GenerationRequest
from runtime_service.core.sequence import Sequence
from runtime_service.scheduler.budget import Capacity, check_request, chunk_len, pages_to_grow, pages_to_start
from shared.errors import FieldOutOfRange, KVExhausted
from shared.ids import PageId
from shared.kv_spec import DType, KVCacheSpec, LayerGroup, Layout
from shared.profiles import parse_profile
from tests.support.serving import request


def spec(
    *, windows: tuple[int | None, ...] = (None,), page_size: int = 4, max_len: int = 64, layout: Layout = Layout.PAGED
) -> KVCacheSpec:
    groups = tuple(
        LayerGroup(layers=(index,), kv_heads=1, head_dim=2, dtype=DType.FLOAT32, window=window)
        for index, window in enumerate(windows)
    )
    return KVCacheSpec(groups, layout, page_size, max_len)


def capacity(num_pages: int = 10, **options: object) -> Capacity:
    return Capacity(spec(**options), num_pages, vocab_size=100, max_position=200)


def rounds(budget: int, interval: int) -> CompactionParams:
    return CompactionParams("sink_recent", budget, interval, sinks=1)


@pytest.mark.parametrize(("prompt", "max_tokens"), [(40, 1), (1, 40), (20, 21)])
def test_the_last_sampled_token_needs_no_entry(prompt: int, max_tokens: int) -> None:
    check_request(request([1] * prompt, max_tokens), capacity(10))
    with pytest.raises(KVExhausted, match="need 41 KV entries, 11 pages of 4; this pool has 10"):
        check_request(request([1] * prompt, max_tokens + 1), capacity(10))


def test_what_can_never_fit_is_refused_with_numbers_and_a_smaller_one_is_not() -> None:
    """BR-113: pool of 40 pages, model maximum 120 pages; 64 pages' worth would wait for ever."""
    place = Capacity(spec(max_len=480), num_pages=40, vocab_size=100, max_position=480)
    with pytest.raises(KVExhausted, match="need 256 KV entries, 64 pages of 4; this pool has 40"):
        check_request(request([1] * 200, 57), place)
    check_request(request([1] * 100, 20), place)


def test_more_than_an_engine_holds_a_sequence_is_a_bad_field() -> None:
    with pytest.raises(FieldOutOfRange, match="need 65 KV entries; this engine holds 64 a sequence") as caught:
        check_request(request([1] * 60, 6), capacity(100))
    assert caught.value.field == "stopping.max_tokens"
    check_request(request([1] * 60, 5), capacity(100))


@pytest.mark.parametrize("layout", Layout)
def test_compaction_bounds_what_a_request_must_hold(layout: Layout) -> None:
    place = capacity(10, layout=layout, page_size=64 if layout is Layout.LINEAR else 4)
    check_request(request([1] * 100, 90, compaction=rounds(30, 10)), place)
    with pytest.raises(FieldOutOfRange, match="need 65 KV entries at once with this compaction; this engine holds 64"):
        check_request(request([1] * 100, 90, compaction=rounds(60, 5)), place)


def test_pages_needed_with_compaction_are_those_of_budget_and_interval() -> None:
    check_request(request([1] * 100, 90, compaction=rounds(30, 10)), capacity(10))
    with pytest.raises(KVExhausted, match="need 41 KV entries at once with this compaction, 11 pages"):
        check_request(request([1] * 100, 90, compaction=rounds(30, 11)), capacity(10))


def test_a_large_budget_does_not_make_a_small_request_large() -> None:
    check_request(request([1] * 30, 11, compaction=rounds(1000, 1000)), capacity(10))


def test_positions_end_where_the_model_ends() -> None:
    check_request(request([1] * 100, 101, compaction=rounds(8, 8)), capacity())
    with pytest.raises(FieldOutOfRange, match="reach position 200; the model's last is 199"):
        check_request(request([1] * 100, 102, compaction=rounds(8, 8)), capacity())


@pytest.mark.parametrize("token_id", [-1, 100, 2**40])
def test_a_token_id_outside_the_vocabulary_is_named(token_id: int) -> None:
    with pytest.raises(FieldOutOfRange, match=f"must be 0..99, got {token_id}") as caught:
        check_request(request([5, token_id, 7], 1), capacity())
    assert caught.value.field == "prompt"
    check_request(request([0, 99], 1), capacity())


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(FieldOutOfRange, match="at least one token"):
        check_request(request([], 1), capacity())


def test_a_stop_id_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(FieldOutOfRange, match="stop_token_ids"):
        check_request(request([1], 1, stop_token_ids=[100]), capacity())


def test_a_budget_below_a_sliding_window_is_refused_with_both_numbers() -> None:
    place = capacity(windows=(None, 8, 16))
    with pytest.raises(FieldOutOfRange, match="at least the sliding window of 16 entries, got 15") as caught:
        check_request(request([1], 50, compaction=rounds(15, 4)), place)
    assert caught.value.field == "kv.policy.budget"
    check_request(request([1], 50, compaction=rounds(16, 4)), place)
    check_request(request([1], 30), place)


def sequence(wanted: GenerationRequest, pages: int = 0) -> Sequence:
    made = Sequence(wanted, 0, 0)
    made.hold(PageId(p) for p in range(1, pages + 1))
    return made


def test_starting_takes_the_pages_of_all_that_is_known() -> None:
    assert pages_to_start(sequence(request([1] * 8, 9)), spec()) == 2
    assert pages_to_start(sequence(request([1] * 9, 9)), spec()) == 3
    assert pages_to_start(sequence(request([1] * 90, 9, compaction=rounds(8, 4))), spec()) == 3
    resumed = sequence(request([1] * 8, 9))
    resumed.tokens += [2, 3]
    assert pages_to_start(resumed, spec()) == 3


def test_one_page_of_growth_for_each_that_can_still_grow() -> None:
    growing = sequence(request([1] * 8, 9), pages=3)
    full = sequence(request([1] * 8, 9), pages=4)
    bounded = sequence(request([1] * 90, 9, compaction=rounds(8, 4)), pages=3)
    assert pages_to_grow([growing, full, bounded], spec()) == 1
    assert pages_to_grow([growing, growing], spec()) == 2


def test_a_chunk_is_bounded_by_what_is_known_by_the_profile_and_by_the_next_round() -> None:
    profile = parse_profile("prefill=2x16")
    assert chunk_len(sequence(request([1] * 7, 9)), profile) == 7
    assert chunk_len(sequence(request([1] * 70, 9)), profile) == 16
    compacted = sequence(request([1] * 70, 9, compaction=rounds(8, 4)))
    assert chunk_len(compacted, profile) == 12
    compacted.advance(10)
    assert chunk_len(compacted, profile) == 2

"""Serving with rounds against an oracle whose dense cache is pruned to the same positions, token for token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from runtime_service.core.params import CompactionParams, SamplingParams
from runtime_service.engine.engine import EngineInputs
from shared.errors import FieldOutOfRange
from shared.kernels.compaction.modes import Mode
from shared.kv_spec import Layout
from tests.support.serving import RecordingStream, request, rounds_of, run, serving, submit
from tests.support.tiny_engine import Oracle, Round, TinyEngine, TinyModel, sink_recent_rounds

both_layouts = pytest.mark.parametrize("layout", Layout)
BUDGET, INTERVAL, SINKS = 12, 6, 2
RECENT = CompactionParams("sink_recent", BUDGET, INTERVAL, SINKS)
KNORM = CompactionParams("knorm", BUDGET, INTERVAL, SINKS)


def recent_rounds(prompt: int, count: int) -> list[Round]:
    return sink_recent_rounds(prompt + count - 1, BUDGET, INTERVAL, SINKS)


@both_layouts
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("prompt_len", [3, 18, 45])
def test_output_equals_the_pruned_oracles_over_many_rounds(layout: Layout, window: int | None, prompt_len: int) -> None:
    """BR-066. The rounds come from the policy's definition, not from the runtime; a prompt may be longer than the budget."""
    model, prompt = TinyModel(window=window), [(7 * n) % 200 for n in range(prompt_len)]
    loop = serving(TinyEngine(model, layout=layout), num_pages=40)
    (stream,) = submit(loop, request(prompt, 40, compaction=RECENT))
    run(loop)
    rounds = recent_rounds(prompt_len, 40)
    assert len(rounds) >= 3
    assert stream.tokens() == Oracle(model).expected_tokens(prompt, 40, rounds)
    usage = stream.usage
    assert (usage.compaction_rounds, usage.tokens_evicted) == (len(rounds), len(rounds) * INTERVAL)
    assert usage.physical_length == prompt_len + 39 - len(rounds) * INTERVAL


def test_evicting_matters_to_this_model() -> None:
    """Or the tests of this file could not fail."""
    oracle, prompt = Oracle(), list(range(20))
    assert oracle.expected_tokens(prompt, 20) != oracle.expected_tokens(prompt, 20, recent_rounds(20, 20))


@both_layouts
@pytest.mark.parametrize("mode", Mode)
def test_knorm_output_equals_the_oracles_with_the_positions_it_chose(layout: Layout, mode: Mode) -> None:
    loop = serving(TinyEngine(layout=layout), num_pages=40)
    (stream,) = submit(loop, request(range(30), 40, compaction=replace(KNORM, mode=mode)))
    run(loop)
    rounds = rounds_of(stream.sequences[0])
    assert len(rounds) >= 3
    assert all(round_.kept[:SINKS] == (0, 1) and len(round_.kept) == BUDGET for round_ in rounds)
    assert any(set(round_.kept) != set(recent.kept) for round_, recent in zip(rounds, recent_rounds(30, 40), strict=True))
    assert stream.tokens() == Oracle().expected_tokens(range(30), 40, rounds)


@both_layouts
@pytest.mark.parametrize(
    ("policy", "rows", "window", "mode"),
    [
        ("knorm_per_head", 2, 5, Mode.ORDERED),
        ("knorm_per_head", 2, None, Mode.HOLE_FILLING),
        ("knorm_per_layer_head", 4, None, Mode.ORDERED),
        ("knorm_per_layer_head", 4, None, Mode.HOLE_FILLING),
    ],
)
def test_heads_with_entries_of_their_own_equal_the_oracles(
    layout: Layout, policy: str, rows: int, window: int | None, mode: Mode
) -> None:
    model = TinyModel(window=window)
    loop = serving(TinyEngine(model, layout=layout), num_pages=40)
    (stream,) = submit(loop, request(range(30), 40, compaction=CompactionParams(policy, BUDGET, INTERVAL, SINKS, mode)))
    run(loop)
    rounds = rounds_of(stream.sequences[0])
    assert len(rounds) >= 3
    assert all(len(round_.heads) == rows for round_ in rounds)
    assert len(set(rounds[-1].heads)) > 1
    assert stream.tokens() == Oracle(model).expected_tokens(range(30), 40, rounds)


def test_filling_holes_moves_less_than_keeping_order_and_says_the_same() -> None:
    moved = {}
    for mode in Mode:
        loop = serving(TinyEngine(), num_pages=40)
        (stream,) = submit(loop, request(range(10), 45, compaction=replace(RECENT, mode=mode)))
        run(loop)
        moved[mode] = stream.usage.rows_moved
        assert stream.usage.bytes_moved == moved[mode] * 2 * 8 * 4
        assert stream.tokens() == Oracle().expected_tokens(range(10), 45, recent_rounds(10, 45))
    rounds = len(recent_rounds(10, 45))
    assert moved == {Mode.ORDERED: rounds * 4 * (BUDGET - SINKS), Mode.HOLE_FILLING: rounds * 4 * INTERVAL}


def test_hole_filling_is_refused_for_a_model_with_a_window() -> None:
    loop = serving(TinyEngine(TinyModel(window=5)), num_pages=40)
    with pytest.raises(FieldOutOfRange, match="Use ordered"):
        submit(loop, request(range(10), 5, compaction=replace(RECENT, mode=Mode.HOLE_FILLING)))


def test_a_linear_engine_generates_far_past_its_slot() -> None:
    loop = serving(TinyEngine(layout=Layout.LINEAR, max_len=20), num_pages=2)
    (stream,) = submit(loop, request([1, 2, 3], 150, compaction=RECENT))
    run(loop)
    assert stream.tokens() == Oracle().expected_tokens([1, 2, 3], 150, recent_rounds(3, 150))
    assert stream.usage.peak_pages == 1
    with pytest.raises(FieldOutOfRange, match="need 152 KV entries; this engine holds 20"):
        submit(loop, request([1, 2, 3], 150))


def test_pages_stay_at_budget_plus_interval_plus_one_while_freed_ones_serve_another() -> None:
    """BR-055: what a round freed stays freed; the neighbour's whole life fits into it."""
    loop = serving(TinyEngine(max_len=200), num_pages=1 + 5 + 3)
    allocator = loop._sessions["tiny"].allocator
    long, *_ = submit(loop, request(range(10), 180, compaction=RECENT))
    neighbours: list[RecordingStream] = []
    while not long.is_ended:
        if not neighbours or neighbours[-1].is_ended:
            neighbours += submit(loop, request([len(neighbours) + 5, 6], 9))
        loop.turn()
        assert len(long.sequences[0].pages) <= -(-(BUDGET + INTERVAL) // 4) + 1
        assert long.sequences[0].physical_len <= BUDGET + INTERVAL
        allocator.check_integrity()
    run(loop)
    assert long.tokens() == Oracle().expected_tokens(range(10), 180, recent_rounds(10, 180))
    assert len(neighbours) > 5
    for number, stream in enumerate(neighbours):
        assert stream.tokens() == Oracle().expected_tokens([number + 5, 6], 9)
    assert loop.load().engines[0].preemptions == 0


def test_alone_in_a_batch_and_joining_a_running_one_eviction_is_the_same() -> None:
    """BR-071: the same prompt and budget, and never more entries than budget and interval."""
    expected = Oracle().expected_tokens(range(15), 30, recent_rounds(15, 30))
    most = 0

    def note(inputs: EngineInputs) -> None:
        nonlocal most
        most = max(most, int(inputs.write_start.max()) + inputs.query_len)

    engine = TinyEngine()
    engine.on_run = note
    loop = serving(engine, num_pages=80)
    (alone,) = submit(loop, request(range(15), 30, compaction=RECENT))
    run(loop)
    together = submit(loop, *(request(range(15), 30, compaction=RECENT) for _ in range(2)))
    for _ in range(7):
        loop.turn()
    together += submit(loop, request(range(15), 30, compaction=RECENT))
    run(loop)
    assert [stream.tokens() for stream in (alone, *together)] == [expected] * 4
    assert [stream.usage.tokens_evicted for stream in (alone, *together)] == [alone.usage.tokens_evicted] * 4
    assert alone.usage.tokens_evicted > 0
    assert most == BUDGET + INTERVAL


def test_a_new_request_in_the_same_slot_starts_clean() -> None:
    """BR-053: nothing of what the request before it dropped is counted or subtracted."""
    loop = serving(TinyEngine(layout=Layout.LINEAR), num_pages=2)
    submit(loop, request(range(40), 20, compaction=RECENT))
    run(loop)
    (second,) = submit(loop, request(range(15), 10, compaction=CompactionParams("sink_recent", 30, 10)))
    run(loop)
    assert (second.usage.tokens_evicted, second.usage.physical_length) == (0, 24)
    assert second.tokens() == Oracle().expected_tokens(range(15), 10)


def test_logical_lengths_go_on_while_physical_ones_start_again() -> None:
    """BR-055: 18 entries, compacted to 12: the next ones are written at 12, 13, 14 and are at positions 18, 19, 20."""
    engine, seen = TinyEngine(), []
    engine.on_run = lambda inputs: seen.append((inputs.write_start.item(), inputs.position_ids[0, 0].item()))
    loop = serving(engine, num_pages=40)
    (stream,) = submit(loop, request(range(18), 5, compaction=RECENT))
    run(loop)
    assert seen[-4:] == [(12, 18), (13, 19), (14, 20), (15, 21)]
    assert (stream.usage.prompt_tokens, stream.usage.generated_tokens) == (18, 5)


def test_freed_pages_filled_with_nan_by_their_new_owner_do_not_reach_the_old_one() -> None:
    """BR-062, BR-063."""
    loop = serving(TinyEngine(), num_pages=40)
    session = loop._sessions["tiny"]
    (stream,) = submit(loop, request(range(10), 40, compaction=RECENT))
    while loop.turn():
        mine = set(stream.sequences[0].pages)
        for layer in range(2):
            for page in set(range(40)) - mine:
                session.pool.by_page(layer)[page] = float("nan")
    assert stream.tokens() == Oracle().expected_tokens(range(10), 40, recent_rounds(10, 40))


def test_a_sequence_under_pressure_is_compacted_early_and_is_still_what_the_oracle_says() -> None:
    """Pages are short, nobody is preempted, and the rounds that ran are the ones the oracle is told."""
    loop = serving(TinyEngine(), num_pages=11)
    early = CompactionParams("sink_recent", 8, 28, 2)
    pressed, plain = submit(loop, request(range(9), 50, compaction=early), request(range(40, 49), 14))
    run(loop)
    rounds = rounds_of(pressed.sequences[0])
    assert rounds[0].at < 8 + 28
    assert pressed.tokens() == Oracle().expected_tokens(range(9), 50, rounds)
    assert plain.tokens() == Oracle().expected_tokens(range(40, 49), 14)
    assert loop.load().engines[0].preemptions == 0


@both_layouts
@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("prompt_len", [7, 16, 18, 30])
def test_forked_samples_are_compacted_without_touching_what_they_share(layout: Layout, mode: Mode, prompt_len: int) -> None:
    """BR-037. A prompt of 18 or 30 is compacted at the very step that forks it."""
    loop = serving(TinyEngine(layout=layout), num_pages=60)
    sampling = SamplingParams(temperature=0.0, n=3)
    (stream,) = submit(loop, request(range(prompt_len), 30, sampling=sampling, compaction=replace(RECENT, mode=mode)))
    run(loop)
    expected = Oracle().expected_tokens(range(prompt_len), 30, recent_rounds(prompt_len, 30))
    assert [stream.tokens(index) for index in range(3)] == [expected] * 3
    assert loop.load().engines[0].pages_free == 59
    assert loop.load().engines[0].preemptions == 0


def test_forked_samples_without_pages_for_their_copies_are_recomputed() -> None:
    """BR-038. The round is due in the step that forks, and no page is free to write survivors to."""
    loop = serving(TinyEngine(), num_pages=1 + 8)
    sampling = SamplingParams(temperature=0.0, n=2)
    (stream,) = submit(loop, request(range(18), 30, sampling=sampling, compaction=RECENT))
    run(loop)
    assert loop.load().engines[0].preemptions > 0
    expected = Oracle().expected_tokens(range(18), 30, recent_rounds(18, 30))
    assert [stream.tokens(index) for index in range(2)] == [expected] * 2
    assert loop.load().engines[0].pages_free == 8


def test_evidence_of_the_pool_is_the_sum_of_its_requests() -> None:
    loop = serving(TinyEngine(), num_pages=80)
    streams = submit(loop, *(request(range(n), 30, compaction=RECENT) for n in (5, 17, 33)))
    run(loop)
    total = loop.load().engines[0].compaction
    evidence = [stream.sequences[0].evidence for stream in streams]
    assert total.rounds == sum(e.rounds for e in evidence) == sum(s.usage.compaction_rounds for s in streams)
    assert total.pages_freed == sum(s.usage.pages_freed for s in streams) > 0
    assert total.bytes_moved == total.rows_moved * 2 * 8 * 4 > 0
    assert total.duration_s == pytest.approx(sum(e.duration_s for e in evidence))


def test_rounds_read_the_pool_they_write() -> None:
    """Addresses are stable over rounds: what the engine was given is what is compacted."""
    loop = serving(TinyEngine(), num_pages=40)
    addresses = [tensor.data_ptr() for tensor in loop._sessions["tiny"].pool.tensors]
    submit(loop, request(range(10), 40, compaction=RECENT))
    run(loop)
    assert [tensor.data_ptr() for tensor in loop._sessions["tiny"].pool.tensors] == addresses
    assert not torch.equal(loop._sessions["tiny"].pool.tensors[0], torch.zeros(()))

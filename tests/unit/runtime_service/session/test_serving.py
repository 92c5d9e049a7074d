"""Batched serving on pools against the dense oracle, token for token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from runtime_service.core.params import SamplingParams
from runtime_service.engine.engine import EngineInputs
from runtime_service.sampling import SamplerState, sample
from runtime_service.streaming.events import FinishReason
from shared.kernels.attention import reference
from shared.kv_spec import Layout
from tests.support.serving import request, run, serving, submit
from tests.support.tiny_engine import VOCAB, Oracle, TinyEngine, TinyModel, paged_attend

both_layouts = pytest.mark.parametrize("layout", Layout)
PROMPTS = [[1, 2, 3], [7] * 20, [5], list(range(30, 47)), [9, 8], list(range(100, 133)), [3] * 7, [200, 100, 50]]


@pytest.mark.parametrize("page_dim", [0, 1])
@pytest.mark.parametrize("window", [None, 5])
def test_the_tiny_engine_attends_as_the_reference_op_does(page_dim: int, window: int | None) -> None:
    rng = torch.Generator().manual_seed(0)
    pool = torch.randn((6, 2, 2, 4, 8) if page_dim == 0 else (2, 6, 2, 16, 8), generator=rng)
    table = torch.tensor([[3, 1, 5, 2], [4, 0, 0, 0]] if page_dim == 0 else [[3], [4]], dtype=torch.int32)
    start = torch.tensor([9, 1], dtype=torch.int32)
    q, k, v = (torch.randn(2, heads, 3, 8, generator=rng, dtype=torch.float64) for heads in (4, 2, 2))
    expected_pool = pool.clone()
    expected = reference.paged_attend(
        q.float(), k.float(), v.float(), expected_pool, table, start, page_dim, 8**-0.5, window, None, None
    )
    got = paged_attend(q, k, v, pool.movedim(page_dim, 0), table.long(), start.long(), window)
    torch.testing.assert_close(got.float(), expected)
    assert torch.equal(pool, expected_pool)


@both_layouts
@pytest.mark.parametrize("window", [None, 6])
def test_greedy_tokens_equal_the_oracles_alone_and_in_a_full_batch(layout: Layout, window: int | None) -> None:
    """BR-085: a row's tokens do not depend on its neighbours or their lengths."""
    model = TinyModel(window=window)
    oracle = Oracle(model)
    loop = serving(TinyEngine(model, layout=layout), num_pages=120)
    streams = submit(loop, *(request(prompt, 14) for prompt in PROMPTS))
    run(loop)
    (alone,) = submit(loop, request(PROMPTS[3], 14))
    run(loop)
    expected = [oracle.expected_tokens(prompt, 14) for prompt in PROMPTS]
    assert [stream.tokens() for stream in streams] == expected
    assert alone.tokens() == expected[3]
    assert len(set(map(tuple, expected))) == len(expected)
    assert all(stream.finish().reason is FinishReason.LENGTH for stream in streams)


@both_layouts
def test_arrivals_at_different_times_join_a_running_batch(layout: Layout) -> None:
    oracle = Oracle()
    loop = serving(TinyEngine(layout=layout), num_pages=120)
    streams = []
    for prompt in PROMPTS:
        streams += submit(loop, request(prompt, 10))
        for _ in range(3):
            loop.turn()
    run(loop)
    assert [stream.tokens() for stream in streams] == [oracle.expected_tokens(prompt, 10) for prompt in PROMPTS]


def test_each_sequence_takes_positions_one_after_another_in_as_many_rows_as_there_are_sequences() -> None:
    """BR-084, BR-030."""
    engine = TinyEngine()
    positions: dict[int, list[int]] = {}

    def note(inputs: EngineInputs) -> None:
        for row in range(inputs.batch):
            positions.setdefault(int(inputs.block_table[row, 0]), []).extend(inputs.position_ids[row].tolist())

    engine.on_run = note
    loop = serving(engine, num_pages=120)
    submit(loop, *(request(prompt, 6) for prompt in PROMPTS[:3]))
    run(loop)
    assert sorted(positions.values()) == sorted(list(range(len(prompt) + 5)) for prompt in PROMPTS[:3])


def test_what_lies_on_pages_of_others_does_not_matter() -> None:
    """BR-063, BR-027: every page a sequence does not own, the dump page included, holds NaN."""
    loop = serving(TinyEngine(), num_pages=40)
    session = loop._sessions["tiny"]
    for tensor in session.pool.tensors:
        tensor.fill_(float("nan"))
    streams = submit(loop, request([4], 9), request([1, 2, 3, 4, 5], 9))
    run(loop)
    oracle = Oracle()
    assert [s.tokens() for s in streams] == [oracle.expected_tokens([4], 9), oracle.expected_tokens([1, 2, 3, 4, 5], 9)]
    assert all(tensor[0].isnan().all() for tensor in session.pool.tensors)  # steps without padding leave the dump page alone


def test_generation_ends_at_the_models_end_of_text_unless_told_otherwise() -> None:
    expected = Oracle().expected_tokens([1, 2, 3], 20)
    loop = serving(TinyEngine(eos_ids=expected[9:10]), num_pages=40)
    ignoring = request([1, 2, 3], 20)
    stopping = replace(request([1, 2, 3], 20), stop=replace(ignoring.stop, ignore_eos=False))
    first, second = submit(loop, ignoring, stopping)
    run(loop)
    assert first.tokens() == expected
    assert second.tokens() == expected[: expected.index(expected[9]) + 1]
    assert second.finish().reason is FinishReason.STOP


def test_samples_of_one_request_differ_and_are_indexed_and_repeat_with_their_seed() -> None:
    """BR-123, BR-108: n = 3 at temperature 1; the same seed beside other requests gives the same three."""
    drawn = SamplingParams(temperature=1.0, seed=7, n=3)
    oracle = Oracle()

    def expected(index: int) -> list[int]:
        state = SamplerState.create(drawn, [1, 2, 3], vocab_size=VOCAB, sample_index=index)

        def choose(logits: np.ndarray) -> int:
            (token,) = sample(torch.from_numpy(logits)[None], [state])
            return token.token_id

        return oracle.expected_tokens([1, 2, 3], 12, choose=choose)

    loop = serving(TinyEngine(), num_pages=120)
    (alone,) = submit(loop, request([1, 2, 3], 12, sampling=drawn))
    run(loop)
    _, beside = submit(loop, request([9] * 11, 20), request([1, 2, 3], 12, sampling=drawn))
    run(loop)
    for stream in (alone, beside):
        assert [stream.tokens(index) for index in range(3)] == [expected(index) for index in range(3)]
        assert [stream.finish(index).reason for index in range(3)] == [FinishReason.LENGTH] * 3
    assert len({tuple(alone.tokens(index)) for index in range(3)}) == 3
    assert (alone.usage.generated_tokens, alone.usage.prompt_tokens) == (36, 3)


@both_layouts
@pytest.mark.parametrize("prompt_len", [3, 16, 23])
def test_the_prompt_of_several_samples_is_computed_once(layout: Layout, prompt_len: int) -> None:
    """BR-037, BR-123: greedy samples are alike, so each can be compared; they share pages and write their own."""
    engine, rows = TinyEngine(layout=layout), []
    engine.on_run = lambda inputs: rows.append((inputs.profile, inputs.batch))
    loop = serving(engine, num_pages=120)
    (stream,) = submit(loop, request(range(prompt_len), 12, sampling=SamplingParams(temperature=0.0, n=4)))
    run(loop)
    assert [batch for profile, batch in rows if profile == "prefill"] == [1] * -(-prompt_len // 16)
    assert [batch for profile, batch in rows if profile == "decode"] == [4] * 11
    assert [stream.tokens(index) for index in range(4)] == [Oracle().expected_tokens(range(prompt_len), 12)] * 4
    if layout is Layout.PAGED:
        full, whole = prompt_len // 4, -(-(prompt_len + 11) // 4)
        assert stream.usage.peak_pages == full + 4 * (whole - full)
    assert loop.load().engines[0].pages_free == 119


def test_samples_without_a_page_for_a_fork_compute_the_prompt_themselves() -> None:
    """BR-038."""
    loop = serving(TinyEngine(), num_pages=1 + 8)
    (stream,) = submit(loop, request(range(18), 9, sampling=SamplingParams(temperature=0.0, n=4)))
    run(loop)
    assert [stream.tokens(index) for index in range(4)] == [Oracle().expected_tokens(range(18), 9)] * 4
    assert loop.load().engines[0].pages_free == 8


def test_one_sample_may_stop_early_while_the_others_go_on() -> None:
    """BR-123."""
    drawn = SamplingParams(temperature=1.0, seed=7, n=3)
    loop = serving(TinyEngine(), num_pages=120)
    (whole,) = submit(loop, request([1, 2, 3], 12, sampling=drawn))
    run(loop)
    stop_id = whole.tokens(1)[4]
    cut = [tokens[: tokens.index(stop_id) + 1] if stop_id in tokens else tokens for tokens in map(whole.tokens, range(3))]
    (stopped,) = submit(loop, request([1, 2, 3], 12, sampling=drawn, stop_token_ids=[stop_id]))
    run(loop)
    assert [stopped.tokens(index) for index in range(3)] == cut
    assert stopped.finish(1).match == stop_id
    assert len({len(tokens) for tokens in cut}) > 1
    assert loop.load().engines[0].pages_free == 119

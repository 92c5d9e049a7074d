"""The sampler against distributions worked out by hand, and the ways samplers have failed before."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch

from runtime_service.core.params import SamplingParams
from runtime_service.core.sampled import SampledToken
from runtime_service.sampling import SamplerState, sample
from shared.errors import InternalError


def state(vocab_size=8, prompt_ids=(), sample_index=0, end_ids=(), min_tokens=0, **params):
    return SamplerState.create(
        SamplingParams(**params),
        prompt_ids,
        vocab_size=vocab_size,
        sample_index=sample_index,
        end_ids=end_ids,
        min_tokens=min_tokens,
    )


def run(logits, one, steps):
    row = torch.tensor([logits], dtype=torch.float32)
    return [sample(row, [one])[0].token_id for _ in range(steps)]


def test_greedy_takes_the_lowest_id_among_equals():
    rows = torch.tensor([[0.0, 3.0, 3.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
    assert sample(rows, [state(4), state(4)]) == [SampledToken(1), SampledToken(0)]
    with_logprobs = sample(rows, [state(4, logprobs=0), state(4, logprobs=0)])
    assert [token.token_id for token in with_logprobs] == [1, 0], "the other path has the same rule"


@pytest.mark.parametrize("params", [{}, {"logprobs": 2}, {"temperature": 1.0, "top_k": 3, "seed": 1}, {"repetition_penalty": 2.0}])
def test_padding_of_the_vocabulary_is_never_chosen(params):
    """BR-101: logits of width 320, a tokenizer of 300."""
    logits = torch.zeros(1, 320)
    logits[0, 310], logits[0, 7] = 100.0, 50.0
    one = state(300, **params)
    assert sample(logits, [one])[0].token_id == 7
    if "logprobs" in params:
        assert sample(logits, [one])[0].top_logprobs[0].token_id == 7


def test_padding_in_the_prompt_or_among_the_end_tokens_changes_nothing():
    """A model's vocabulary is wider than its tokenizer's: callers may send and name the ids between, nobody can choose them."""
    logits = [4.0, 5.0, 1.0, 9.0]
    assert run(logits, state(3, prompt_ids=(1, 3), repetition_penalty=2.0), 1) == [0]
    assert run(logits, state(3, end_ids=(1, 3), min_tokens=1), 2) == [0, 1]


@pytest.mark.parametrize("temperature", [1e-4, 1e-5, 1e-12, 5e-324])
def test_tiny_temperatures_act_as_greedy(temperature):
    """BR-103: 12.5 / 1e-5 does not fit fp16; batch mates are not affected."""
    logits = torch.tensor([[1.0, 12.5, 12.25, -5.0]], dtype=torch.float16).float().repeat(2, 1)
    mate, alone = state(4, temperature=1.0, seed=3), state(4, temperature=1.0, seed=3)
    tiny = state(4, temperature=temperature, seed=5)
    for _ in range(20):
        first, second = sample(logits, [tiny, mate])
        assert first == SampledToken(1)
        assert second == sample(logits[:1], [alone])[0]


def test_tiny_top_p_acts_as_greedy():
    """BR-103."""
    assert set(run([1.0, 1.2, 1.1, 0.0], state(4, temperature=5.0, top_p=1e-9, seed=1), 50)) == {1}


@pytest.mark.parametrize("top_k", [0, 8, 9, 10_000_000])
def test_top_k_at_or_over_the_vocabulary_keeps_all_of_it(top_k):
    """BR-105, next to a greedy row."""
    logits = torch.zeros(2, 8)
    one, free = state(temperature=1.0, top_k=top_k, seed=9), state(temperature=1.0, seed=9)
    drawn = []
    for _ in range(60):
        first, greedy = sample(logits, [one, state()])
        drawn.append(first.token_id)
        assert greedy == SampledToken(0)
    assert drawn == run([0.0] * 8, free, 60)
    assert set(drawn) == set(range(8))


def test_top_k_keeps_exactly_k_and_ties_go_to_lower_ids():
    assert set(run([1.0, 0.0, 1.0, 1.0, 2.0], state(5, temperature=1.0, top_k=3, seed=2), 300)) == {0, 2, 4}
    assert set(run([1.0, 0.0, 1.0, 1.0, 2.0], state(5, temperature=1.0, top_k=4, seed=2), 300)) == {0, 2, 3, 4}


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = [math.log(p) for p in (0.4, 0.1, 0.3, 0.2)]
    for top_p, kept in ((0.39, {0}), (0.41, {0, 2}), (0.69, {0, 2}), (0.75, {0, 2, 3}), (0.95, {0, 1, 2, 3})):
        assert set(run(logits, state(4, temperature=1.0, top_p=top_p, seed=2), 400)) == kept, top_p


def test_top_p_looks_at_what_top_k_left():
    """0.4 and 0.3 are left; 0.4 alone is 57% of that."""
    logits = [math.log(p) for p in (0.4, 0.1, 0.3, 0.2)]
    assert set(run(logits, state(4, temperature=1.0, top_k=2, top_p=0.5, seed=2), 200)) == {0}


def test_min_p_is_relative_to_the_likeliest():
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    assert set(run(logits, state(4, temperature=1.0, min_p=0.25, seed=2), 400)) == {0, 1, 2}


def test_draws_follow_the_distribution():
    """4 standard deviations of a binomial over 20,000 draws; the seed is fixed, so this cannot flake."""
    weights = np.array([0.05, 0.45, 0.2, 0.3])
    counts = Counter(run([math.log(w) for w in weights], state(4, temperature=1.0, seed=11), 20_000))
    for token_id, weight in enumerate(weights):
        assert abs(counts[token_id] - 20_000 * weight) < 4 * math.sqrt(20_000 * weight * (1 - weight))


def test_temperature_flattens():
    """At T=2 odds of 9:1 become 3:1."""
    counts = Counter(run([math.log(9.0), 0.0], state(2, temperature=2.0, seed=4), 8000))
    assert abs(counts[0] - 6000) < 4 * math.sqrt(8000 * 0.75 * 0.25)


def test_the_generator_moves_on():
    """BR-107: uniform over 1000 ids, 200 steps."""
    first = run([0.0] * 1000, state(1000, temperature=1.0, seed=1), 200)
    assert 165 <= len(set(first)) <= 195
    assert run([0.0] * 1000, state(1000, temperature=1.0, seed=1), 200) == first


def test_a_seed_is_independent_of_slot_batch_and_arrival():
    """BR-108."""
    row = torch.linspace(0, 1, 50)
    alone = run(row.tolist(), state(50, temperature=1.0, seed=7), 20)
    for slot in range(3):
        states = [state(50, temperature=0.7, seed=100 + i) for i in range(3)]
        states[slot] = state(50, temperature=1.0, seed=7)
        assert [sample(row.repeat(3, 1), states)[slot].token_id for _ in range(20)] == alone


def test_samples_of_one_request_differ():
    """BR-108."""
    first, second = (run([0.0] * 100, state(100, temperature=1.0, seed=7, sample_index=index), 20) for index in (0, 1))
    assert first != second


def test_without_a_seed_requests_differ():
    assert run([0.0] * 1000, state(1000, temperature=1.0), 8) != run([0.0] * 1000, state(1000, temperature=1.0), 8)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 1}, {"logprobs": 1}, {"repetition_penalty": 1.5}])
def test_a_broken_row_fails_alone(bad, params):
    logits = torch.zeros(3, 8)
    logits[1, 5] = bad
    logits[:, 2] = 9.0
    states = [state(), state(**params), state()]
    first, broken, third = sample(logits, states)
    assert first == third == SampledToken(2)
    assert isinstance(broken, InternalError)
    assert [one.num_generated for one in states] == [1, 0, 1]


def test_a_row_of_minus_infinity_has_nothing_to_choose():
    assert isinstance(sample(torch.full((1, 8), -math.inf), [state()])[0], InternalError)


def test_a_broken_value_counts_even_where_it_may_not_be_chosen():
    logits = torch.tensor([[0.0, math.inf, 1.0, 2.0]])
    assert isinstance(sample(logits, [state(4, end_ids=(1,), min_tokens=5, logprobs=0)])[0], InternalError)


def test_some_minus_infinities_are_masks():
    logits = torch.full((1, 8), -math.inf)
    logits[0, 3] = 0.0
    assert sample(logits, [state(temperature=1.0)])[0].token_id == 3


def test_end_tokens_wait_for_min_tokens():
    logits = [0.0, 5.0, 4.0, 1.0]
    assert run(logits, state(4, end_ids=(1, 2), min_tokens=2), 4) == [3, 3, 1, 1]
    drawn = run(logits, state(4, temperature=1.0, seed=1, end_ids=(1, 2), min_tokens=30), 30)
    assert set(drawn) == {0, 3}


def test_repetition_penalty_counts_prompt_and_output():
    """2.0 / 2 < 1.5, and -1 * 2 < -1.5; then the chosen one is penalised in turn."""
    assert run([2.0, 1.5, 0.9], state(3, prompt_ids=[0], repetition_penalty=2.0), 3) == [1, 0, 0]
    assert run([-1.0, -1.5, -9.0], state(3, prompt_ids=[0], repetition_penalty=2.0), 1) == [1]
    assert run([-0.5, -0.6], state(2, prompt_ids=[0], repetition_penalty=2.0), 1) == [1]


def test_presence_and_frequency_penalties_count_output_only():
    assert run([2.0, 1.5], state(2, prompt_ids=[0, 0], presence_penalty=1.0), 4) == [0, 1, 0, 0]
    assert run([2.0, 1.5], state(2, prompt_ids=[0, 0], frequency_penalty=1.0), 4) == [0, 1, 0, 1]


def test_the_smallest_repetition_penalty_stays_finite():
    assert run([1e30, 3e38], state(2, prompt_ids=[1], repetition_penalty=1e-45), 1) == [1]


def test_logprobs_are_the_models_own():
    """Neither temperature, filters nor penalties enter; the reference is float64 log_softmax."""
    logits = torch.tensor([[0.5, 2.0, -1.0, 2.0, 0.0]])
    reference = torch.log_softmax(logits[0].double(), 0).tolist()
    one = state(5, temperature=3.0, top_k=4, presence_penalty=1.0, seed=1, logprobs=3)
    for _ in range(10):
        token = sample(logits, [one])[0]
        assert token.logprob == pytest.approx(reference[token.token_id], abs=1e-6)
        assert [top.token_id for top in token.top_logprobs] == [1, 3, 0]
        assert [top.logprob for top in token.top_logprobs] == pytest.approx([reference[i] for i in (1, 3, 0)], abs=1e-6)
    assert sample(logits, [state(5, logprobs=0)])[0].top_logprobs == ()
    assert sample(logits, [state(5)])[0].logprob is None
    assert len(sample(logits, [state(5, logprobs=20)])[0].top_logprobs) == 5


def test_states_and_rows_must_pair():
    with pytest.raises(ValueError, match="2 rows of logits, 1 states"):
        sample(torch.zeros(2, 8), [state()])

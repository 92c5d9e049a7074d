"""Tokens drawn where the logits lie are the host's: the same maximum, the same filters, the same uniform number."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from runtime_service.core.params import SamplingParams
from runtime_service.core.sampled import SampledToken
from runtime_service.device_sampling import draw_tokens, needs_host
from runtime_service.sampling import SamplerState, sample
from shared.errors import InternalError

VOCAB, PADDED = 300, 320
GREEDY = SamplingParams(temperature=0.0)
DRAWN = (
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.3, seed=2),
    SamplingParams(temperature=1.5, top_k=5, seed=3),
    SamplingParams(temperature=1.0, top_p=0.7, seed=4),
    SamplingParams(temperature=2.0, min_p=0.05, seed=5),
    SamplingParams(temperature=1.3, top_k=40, top_p=0.9, min_p=0.02, seed=6),
)


def states(*params: SamplingParams) -> list[SamplerState]:
    return [SamplerState.create(p, [1], vocab_size=VOCAB) for p in params]


def noise(rows: int, seed: int) -> torch.Tensor:
    logits = torch.randn(rows, PADDED, generator=torch.Generator().manual_seed(seed)) * 3
    logits[:, VOCAB:] = 100.0  # padding of the vocabulary is never chosen
    return logits


def test_seeded_rows_draw_the_hosts_tokens_in_any_company() -> None:
    """Fifty tokens a row, greedy rows between them; no draw here falls within a rounding of a border."""
    params = (DRAWN[0], GREEDY, *DRAWN[1:], GREEDY)
    host, device = states(*params), states(*params)
    for step in range(50):
        logits = noise(len(params), seed=step)
        assert draw_tokens(logits, device).wait() == sample(logits, host)


def test_equal_weights_at_an_edge_keep_the_lower_ids() -> None:
    logits = torch.zeros(3, PADDED)
    params = [SamplingParams(temperature=1.0, seed=seed, top_k=3) for seed in range(2)] + [
        SamplingParams(temperature=1.0, seed=9, top_p=0.01)
    ]
    host, device = states(*params), states(*params)
    for _ in range(20):
        got = draw_tokens(logits, device).wait()
        assert got == sample(logits, host)
        assert all(isinstance(token, SampledToken) and token.token_id < 3 for token in got)


def test_greedy_takes_the_lowest_of_equal_maxima() -> None:
    logits = torch.full((1, PADDED), -1.0)
    logits[0, [40, 17, 200]] = 5.0
    drawn = draw_tokens(logits, states(GREEDY))
    assert drawn.ids.tolist() == [17]
    assert drawn.ids.dtype is torch.int32


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [GREEDY, DRAWN[0]])
def test_a_row_without_a_finite_maximum_fails_alone(bad: float, params: SamplingParams) -> None:
    logits = noise(3, seed=0)
    logits[1, 7] = bad
    drawn = draw_tokens(logits, states(params, params, params))
    first, broken, last = drawn.wait()
    assert isinstance(broken, InternalError)
    assert isinstance(first, SampledToken)
    assert isinstance(last, SampledToken)
    assert 0 <= int(drawn.ids[1]) < VOCAB, "the next step may be launched on it before anybody knows"


def test_what_needs_the_host_says_so() -> None:
    assert not any(needs_host(state) for state in states(GREEDY, *DRAWN))
    assert needs_host(states(dataclasses.replace(GREEDY, logprobs=0))[0])
    assert needs_host(states(dataclasses.replace(GREEDY, repetition_penalty=1.1))[0])
    waiting = SamplerState.create(GREEDY, [1], vocab_size=VOCAB, end_ids=[2], min_tokens=2)
    assert needs_host(waiting)
    waiting.record(5)
    waiting.record(6)
    assert not needs_host(waiting)


def test_the_uniform_number_may_round_up_to_the_whole_mass(monkeypatch: pytest.MonkeyPatch) -> None:
    (state,) = states(SamplingParams(temperature=1.0, seed=0))

    class Last:
        def random(self) -> float:
            return float(np.nextafter(1.0, 0.0))

    logits = torch.full((1, VOCAB), -1e4)
    logits[0, :9] = 0.0
    monkeypatch.setattr(state, "generator", Last())
    assert draw_tokens(logits, [state]).ids.tolist() == [8]

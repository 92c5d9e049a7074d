"""With rounds, the real model's tokens equal eager `transformers` whose cache is pruned to the same entries at the same moments."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import in_parallel
from tests.e2e.hf_oracle import Rounds

pytestmark = [pytest.mark.model, pytest.mark.slow]
STORY = "Once upon a time, a small robot set out to find the sea. "
TOWNS = " ".join(f"In {1900 + i} town {i * 37 % 101} built {i * 7 % 13} bridges and {i * 5 % 11} mills." for i in range(20))


def chat(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("question", "rounds", "max_tokens", "mode"),
    [
        ("How is bread made, from the grain to the loaf?", Rounds(budget=32, interval=16), 100, "HOLE_FILLING"),
        (f"{TOWNS} Tell the history of these towns.", Rounds(budget=96, interval=32), 120, "ORDERED"),
    ],
    ids=["short prompt", "prompt longer than the budget"],
)
def test_tokens_equal_the_pruned_cache(quire, smollm2, question, rounds, max_tokens, mode):
    """Where holes are filled, entries lie in another order than the oracle's: attention does not look at it."""
    prompt = smollm2.oracle.tokenizer.encode(chat(question))
    expected = smollm2.oracle.greedy(prompt, max_tokens, rounds=rounds)
    assert expected.rounds >= 3
    assert expected.tokens != smollm2.oracle.greedy(prompt, max_tokens).tokens, "the rounds must matter, or the test shows nothing"
    chosen = {"budget": rounds.budget, "interval": rounds.interval, "sinks": rounds.sinks, "mode": f"COMPACTION_MODE_{mode}"}
    got = quire.greedy(smollm2.name, prompt, max_tokens, **chosen)
    assert got.tokens == expected.tokens
    assert (got.usage.compaction_rounds, got.usage.tokens_evicted) == (expected.rounds, expected.evicted)


def test_2000_tokens_hold_their_pages_and_lend_the_rest(quire, smollm2_paged):
    budget, interval, page = 256, 64, smollm2_paged.artifact.page_size
    prompt = smollm2_paged.oracle.tokenizer.encode(STORY)
    free = quire.engine_load(smollm2_paged.name).pages_free
    seen: list[int] = []
    alone = smollm2_paged.oracle.greedy(prompt, 32).tokens

    def long_one():
        return quire.greedy(smollm2_paged.name, prompt, 2000, budget=budget, interval=interval)

    def short_one():
        seen.append(quire.engine_load(smollm2_paged.name).pages_free)
        return quire.greedy(smollm2_paged.name, prompt, 32).tokens

    long, *short = in_parallel([long_one, short_one, short_one], [0.0, 10.0, 20.0])
    assert len(long.tokens) == 2000
    assert long.usage.peak_pages <= (budget + interval) // page + 1
    assert long.usage.physical_length < budget + interval
    assert long.usage.compaction_rounds == (len(prompt) + 2000 - 1 - budget) // interval
    assert short == [alone, alone]
    assert min(seen) >= free - ((budget + interval) // page + 1)
    quire.wait_for_pages(smollm2_paged.name, free)


def test_a_linear_engine_generates_past_its_max_len(quire, smollm2_linear):
    assert smollm2_linear.artifact.max_len == 512
    prompt = smollm2_linear.oracle.tokenizer.encode(STORY)
    got = quire.greedy(smollm2_linear.name, prompt, 2000, budget=256, interval=64)
    assert len(got.tokens) == 2000
    assert got.usage.physical_length <= 512

"""float32 greedy output of the real model equals `transformers`, token for token: alone, and mixed in batches of 8."""

from __future__ import annotations

import pytest

from shared.manifest import decode_engine_manifest
from tests.e2e.conftest import in_parallel

pytestmark = [pytest.mark.model, pytest.mark.slow]
MAX_TOKENS = 64
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Q: What is 17 + 25?\nA:",
    "Once upon a time, in a village by the sea, there lived",
    "The three laws of thermodynamics are",
    "<|im_start|>user\nName three fruits.<|im_end|>\n<|im_start|>assistant\n",
    "SELECT name, age FROM users WHERE",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 2, 4, 8, 16,",
    "La tour Eiffel est",
    "Wasser besteht aus",
    "<|im_start|>system\nYou are terse.<|im_end|>\n<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    '{"name": "Ada", "born": 1815, "known_for":',
    "import numpy as np\n\n# Solve a linear system\n",
    "A haiku about autumn leaves:\n",
    "The quick brown fox jumps over the lazy dog. " * 12,
    "Roses are red, violets are blue,",
    "In 1969, humans first",
    "Ingredients: 200 g flour, 2 eggs,",
    "x",
)


@pytest.fixture(scope="module")
def expected(smollm2_paged):
    oracle = smollm2_paged.oracle
    prompts = [oracle.tokenizer.encode(text) for text in PROMPTS]
    return [(prompt, oracle.greedy(prompt, MAX_TOKENS).tokens) for prompt in prompts]


def test_prompts_are_varied(expected):
    lengths = sorted(len(prompt) for prompt, _ in expected)
    assert len(PROMPTS) == 20
    assert lengths[0] == 1
    assert lengths[-1] > 100


def test_the_file_was_read_right(smollm2_paged, expected):
    """What the oracle runs is our conversion too: here it says what the model is known to say."""
    facts = decode_engine_manifest(smollm2_paged.artifact.manifest_json).model
    assert (facts.architecture, facts.num_layers, facts.vocab_size) == ("LlamaForCausalLM", 30, 49152)
    assert (facts.bos_token_id, facts.eos_token_ids) == (1, (2,))
    assert facts.weights_bytes == pytest.approx(538e6, rel=0.01)
    assert smollm2_paged.oracle.tokenizer.decode(expected[0][1][:2]) == " Paris."


def test_alone(quire, smollm2, expected):
    for prompt, tokens in expected:
        assert quire.greedy(smollm2.name, prompt, MAX_TOKENS).tokens == tokens


def test_mixed_in_batches_with_different_arrivals(quire, smollm2, expected):
    for first in range(0, len(expected), 8):
        group = expected[first : first + 8]
        calls = [lambda prompt=prompt: quire.greedy(smollm2.name, prompt, MAX_TOKENS).tokens for prompt, _ in group]
        got = in_parallel(calls, [0.15 * i for i in range(len(calls))])
        assert got == [tokens for _, tokens in group]
    quire.wait_for_pages(smollm2.name, quire.engine_load(smollm2.name).pages_total)


def test_a_conversation_goes_on_from_the_pages_of_what_was_said(quire, smollm2_paged):
    tokenizer, page = smollm2_paged.oracle.tokenizer, smollm2_paged.artifact.page_size
    prompt = tokenizer.encode(PROMPTS[15])
    answer = quire.greedy(smollm2_paged.name, prompt, 24).tokens
    prompt_after = [*prompt, *answer, *tokenizer.encode(" Then the fox slept, and dreamt of")]
    got = quire.greedy(smollm2_paged.name, prompt_after, 24)
    assert got.usage.cached_tokens == (len(prompt) + len(answer) - 1) // page * page > 100  # the last token was never computed
    assert got.tokens == smollm2_paged.oracle.greedy(prompt_after, 24).tokens

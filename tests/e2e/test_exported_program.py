"""An exported `.pt2` goes the way of a checkpoint: the default backend, then tokens over gRPC equal to eager `transformers`."""

from __future__ import annotations

import torch
from torch.export import save

from tests.e2e.conftest import DATA
from tests.support.decoders import greedy, random_model, random_prompt, tiny_config
from tests.support.stock_export import export_stock
from tests.support.tokenizers import byte_level_tokenizer

MAX_LEN, LONGEST = 64, 16


def test_a_program_of_transformers_is_compiled_loaded_and_streamed(quire) -> None:
    """A layer of Gemma 3: its window is in a mask of its own, and the answer is longer than it is."""
    config = tiny_config("gemma3")
    config.vocab_size = 300  # no tokenizer is smaller
    config.num_hidden_layers, config.layer_types = 1, ["sliding_attention"]
    model, oracle = random_model(config), random_model(config)
    model.set_attn_implementation("sdpa")
    source = DATA / "exported" / "model.pt2"
    source.parent.mkdir(exist_ok=True)
    save(export_stock(model, MAX_LEN, LONGEST), source)
    byte_level_tokenizer(config.vocab_size).save(str(source.parent / "tokenizer.json"))

    job = quire.compile(source, max_len=MAX_LEN, profiles=("decode=1x1", f"prefill=1x{LONGEST}"))
    artifact = quire.artifact(job.artifact_id)
    assert [proof.verdict_after for proof in artifact.proof] == ["proved"] * 2
    quire.load(artifact.artifact_id, "exported", num_pages=16)
    try:
        for prompt in (random_prompt(3, seed=1), random_prompt(20, seed=2)):
            with torch.no_grad():
                assert quire.greedy("exported", prompt, 24).tokens == greedy(oracle, prompt, 24)
    finally:
        quire.unload("exported")

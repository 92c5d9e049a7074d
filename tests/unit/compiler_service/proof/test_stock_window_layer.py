"""transformers' own sliding-window cache layer freezes its start when it is exported; its write stays a proper run.

Every aliasing check passes on such a program, and decoding with it is wrong.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export
from transformers import AutoModelForCausalLM, MistralConfig
from transformers.cache_utils import StaticCache, StaticLayer

from compiler_service.proof.certificate import ProofReport, prove_program
from compiler_service.proof.program import CacheDecl
from shared.errors import WriteNotProven
from tests.support.hf_cache import cache_name

WINDOW, MAX_LEN, HEADS, HEAD_DIM = 8, 16, 2, 8


class StockStep(nn.Module):
    """One layer over the stock static cache; `full` replaces the window layer by one of the whole length."""

    def __init__(self, *, full: bool) -> None:
        super().__init__()
        config = MistralConfig(
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=HEADS,
            head_dim=HEAD_DIM,
            vocab_size=32,
            sliding_window=WINDOW,
        )
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
        self.cache = StaticCache(config=config, max_cache_len=MAX_LEN)
        if full:
            self.cache.layers = [StaticLayer(MAX_LEN)]
        self.cache.early_initialization(1, HEADS, HEAD_DIM, torch.float32, torch.device("cpu"))
        self.cached = {cache_name(self.model.forward): self.cache}
        (layer,) = self.cache.layers
        self.register_buffer("k", layer.keys)
        self.register_buffer("v", layer.values)

    def forward(self, input_ids: Tensor, start: Tensor) -> Tensor:
        (layer,) = self.cache.layers
        layer.keys, layer.values, layer.cumulative_length = self.k, self.v, start.clone()
        return self.model(input_ids=input_ids, **self.cached, use_cache=True).logits


def _prove(step: StockStep) -> ProofReport:
    inputs = (torch.zeros(1, 5, dtype=torch.int64), torch.tensor(0))
    program = export(step, inputs, dynamic_shapes=({1: Dim("n", min=1, max=WINDOW)}, None), strict=False)
    caches = {"k_cache.0": CacheDecl("k", layer=0), "v_cache.0": CacheDecl("v", layer=0)}
    return prove_program(program, program.run_decompositions(), caches)


def test_the_frozen_start_of_the_window_layer_is_refused_by_name() -> None:
    report = _prove(StockStep(full=False))
    assert len(report.refusals) == 2
    with pytest.raises(WriteNotProven, match=r"k_cache\.0: .*written from start on, .* masks from 0 on") as error:
        report.require()
    assert "masks from 0 on" in error.value.details["v_cache.0"]


def test_the_full_length_replacement_is_proved() -> None:
    report = _prove(StockStep(full=True))
    report.require()
    assert [certificate.start for certificate in report.certificates] == ["start", "start"]

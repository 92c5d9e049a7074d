"""The judge of engines in bfloat16: the program's own arithmetic, widened."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compiler_service.backends.inductor.exact import Float32, farther_than_rounding
from compiler_service.backends.inductor.probe import _caches, _run_linear
from compiler_service.export.geometry import cache_spec
from compiler_service.export.program import DecoderProgram, export_decoder
from compiler_service.spec import profile_set
from shared.inductor.sample_step import SampleStep, sample_step
from shared.kv_spec import DType, Layout
from tests.support.sources import source_config

PROFILES = profile_set(("decode=4x1", "prefill=2x16"))


def exported(family: str, dtype: DType) -> DecoderProgram:
    config = source_config(family)
    return export_decoder(config, cache_spec(config, dtype, Layout.LINEAR, 32, 32), PROFILES)


def logits_of(
    program: DecoderProgram, weights: dict[str, Tensor], text: SampleStep, widened: bool = False
) -> tuple[Tensor, Tensor]:
    """Of the tokens from the fourth on, behind noise; with the first layer's keys after the step."""
    module = program.program.module(check_guards=False)
    module.load_state_dict({name: weights[stored] for name, stored in program.weights.items()}, strict=False, assign=True)
    caches = _caches(program, text)
    if widened:
        caches = {name: cache.float() for name, cache in caches.items()}
    logits = _run_linear(Float32(module) if widened else module, program, text.chunk(slice(3, 11)), caches)
    return logits.float(), next(iter(caches.values())).float()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_it_is_the_program_of_float32_on_the_same_weights(family: str) -> None:
    rounded, exact = (exported(family, dtype) for dtype in (DType.BFLOAT16, DType.FLOAT32))
    generator = torch.Generator().manual_seed(4)
    weights = {
        stored: (0.2 * torch.randn(exact.program.state_dict[name].shape, generator=generator)).bfloat16()
        for name, stored in exact.weights.items()
    }
    text = sample_step(rounded.cache, rounded.vocab_size, batch=2, query_len=11, start=0, device="cpu")
    as_float32 = replace(text, pools=[pool.float() for pool in text.pools])
    wanted, keys = logits_of(exact, {name: weight.float() for name, weight in weights.items()}, as_float32)
    got, got_keys = logits_of(rounded, weights, text, widened=True)
    own, _ = logits_of(rounded, weights, text)
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(got_keys, keys, rtol=1e-3, atol=1e-3)
    assert (own - wanted).abs().max() > 10 * (got - wanted).abs().max()


def at_angle(exact: Tensor, cosine: float, towards: int) -> Tensor:
    """One row of logits whose cosine to `exact`, a unit vector along axis 0, is `cosine`."""
    logits = cosine * exact
    logits[:, towards] = (1 - cosine**2) ** 0.5
    return logits


@pytest.mark.parametrize(
    ("engine", "program", "is_accepted"),
    [(0.995, 1.0, True), (0.985, 1.0, False), (0.97, 0.99, True), (0.95, 0.99, False), (-0.5, -0.97, True)],
)
def test_an_engine_may_be_as_wrong_as_rounding_makes_the_program(engine: float, program: float, is_accepted: bool) -> None:
    exact = torch.tensor([[1.0, 0.0, 0.0]])
    rounded = torch.cat([exact, at_angle(exact, program, 1)])
    got = torch.cat([at_angle(exact, engine, 2), exact])
    difference = farther_than_rounding(got, rounded, exact.expand(2, 3), 0.99)
    assert (difference == "") == is_accepted, difference

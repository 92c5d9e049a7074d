"""What compares backends on a GPU, on the CPU with the eager engine: the same steps whatever the layout, told line by line."""

from __future__ import annotations

import torch

from shared.kv_spec import Layout
from tests.bench.gpu_backends import BATCHES, sample_logits, table
from tests.support.tiny_engine import VOCAB, TinyEngine, TinyModel


def test_engines_of_one_model_are_asked_the_same() -> None:
    """Pages in no order and slots in no order: the same prompts and the same step after them."""
    one, another = TinyModel(), TinyModel(seed=1)
    engines = [
        TinyEngine(one, layout=Layout.PAGED),
        TinyEngine(one, layout=Layout.LINEAR),
        TinyEngine(another, layout=Layout.PAGED),
    ]
    paged, linear, other = (sample_logits(engine, "cpu", rows=3, tokens=15) for engine in engines)
    assert paged.shape == (6, VOCAB)
    assert torch.cosine_similarity(paged, linear, dim=-1).min() > 0.9999
    assert torch.cosine_similarity(paged, other, dim=-1).max() < 0.9


def test_an_engine_that_failed_has_a_line_with_its_error() -> None:
    row = {"ms": 1.25, "tokens_per_s": 10.0, "of_roofline": 0.5}
    ran = {"decode": {str(batch): row for batch in BATCHES}, "prefill": {"ms": 20.0, "of_matmul_rate": 0.25}, "least_cosine": 0.999}
    head, first, second = table({"inductor": ran, "tensorrt": {"failed": "Traceback\n  ...\nRuntimeError: no kernel"}})
    assert head.count("decode batch") == len(BATCHES)
    assert first.startswith("inductor")
    assert first.count("1.250 ms 50.0%") == len(BATCHES)
    assert "20.000 ms 25.0%" in first
    assert first.endswith("0.999000")
    assert second.startswith("tensorrt")
    assert second.endswith("RuntimeError: no kernel")

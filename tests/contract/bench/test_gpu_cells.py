"""What `make bench-gpu` measures, on the CPU with a tiny engine: the figures are of what they say they are of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import LlamaConfig

from runtime_service.engine.engine import Engine
from runtime_service.kv.pool import KVPool
from shared.kv_spec import DType
from tests.bench.gpu import long_generation
from tests.bench.gpu_cells import PageWatch, bare_decode, bare_prefill, like_requests, mixed_load, served_decode
from tests.bench.gpu_plots import plot_decode, plot_pages
from tests.bench.random_engine import EngineShape, build_random_engine
from tests.bench.served import serve

VOCAB, PAGES = 400, 60


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Of random weights, as the benchmark builds its own."""
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    shape = EngineShape(config, DType.FLOAT32, 128, 8, ("decode=8x1", "prefill=1x64"), "cpu")
    built, _ = build_random_engine(shape, tmp_path_factory.mktemp("engine"))
    yield built
    built.close()


def test_the_bare_loop_decodes_up_to_the_context(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    run, starts = engine.run, []
    monkeypatch.setattr(engine, "run", lambda inputs, pool: (starts.append(int(inputs.write_start[0])), run(inputs, pool))[1])
    pool = KVPool(engine.manifest.cache, PAGES)
    assert bare_decode(engine, pool, 3, 30, 8) > 0
    assert starts[3:] == list(range(22, 30)), "three warm-ups, then the last step sees 30 entries"
    starts.clear()
    assert bare_prefill(engine, pool, 20, 2) > 0
    assert starts == [0, 0, 0]


async def test_served_streams_rounds_and_a_mixed_load(engine: Engine, tmp_path: Path) -> None:
    async with serve(engine, tmp_path, PAGES) as served:
        with PageWatch(served, 0.002) as pages:
            dense = await served_decode(served, like_requests(4, VOCAB, 10, 30))
        assert dense["rounds"] == 0
        assert 0 < dense["inter_token_p50"] <= dense["inter_token_p99"]
        assert max(used for _, used in pages) > 4
        compacted = await served_decode(served, like_requests(4, VOCAB, 20, 20, budget=12, interval=6))
        assert compacted["rounds"] == 4 * ((20 + 20 - 1 - 12) // 6)
        assert 0 < compacted["round_share"] < 1
        mixed = [{"seed": i, "vocab": VOCAB, "prompt_len": 5 + i, "max_tokens": 5, "delay_s": 0.01 * i} for i in range(8)]
        report = await mixed_load(served, mixed)
        assert (report["requests"], report["tokens"], report["errors"]) == (8, 40, [])
        assert (report["pages_missing"], report["pages_leaked"]) == (0, 0)


def test_a_long_generation_is_compared_with_the_dense_one() -> None:
    rates = {"dense": 16_000.0, "compacted": 64_000.0, "compacted_equal": 24_000.0}
    figures = {name: {"tokens_per_s": rate} for name, rate in rates.items()}
    assert long_generation(figures) == {"over_dense_same_bytes": 4.0, "over_dense_equal_batch": 1.5}


def test_plots_are_written_beside_the_figures(tmp_path: Path) -> None:
    row = {"ms": 1.0, "tokens_per_s": 10.0, "of_roofline": 0.8}
    figures = {"decode": {"1": row, "8": row}, "dense_pages": [(0.0, 1), (1.0, 2)], "compacted_equal_pages": [(0.0, 1), (1.0, 1)]}
    for plot in (plot_decode, plot_pages):
        written = tmp_path / plot(json.loads(json.dumps(figures)), tmp_path / "gpu.json")
        assert written.read_bytes().startswith(b"\x89PNG")

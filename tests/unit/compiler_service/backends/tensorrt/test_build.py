"""Decoders built for TensorRT-RTX on this host, GPU or not: one engine, every cache aliased, nothing left to torch."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[5]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch_tensorrt") is None or importlib.util.find_spec("tensorrt_rtx") is None,
    reason="torch_tensorrt and tensorrt_rtx are not installed",
)


def build(directory: Path, *names: str) -> dict[str, Any]:
    process = subprocess.run(
        [sys.executable, "-m", "tests.support.tensorrt_builds", str(directory), *names],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return json.loads(process.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return build(tmp_path_factory.mktemp("plans"), "llama", "gemma3")


LAYERS = {"llama": 2, "gemma3": 3}
HEADS = {"llama": 2, "gemma3": 1}
DIMS = {"llama": 16, "gemma3": 32}


@pytest.mark.parametrize("family", LAYERS)
def test_every_cache_is_aliased_by_a_layer_of_its_own(built: dict[str, Any], family: str) -> None:
    layers = LAYERS[family]
    wanted = {f"{kind}_cache.{layer}" for kind in "kv" for layer in range(layers)}
    assert built[family]["aliases"] == {cache: f"{cache}.updated" for cache in wanted}
    assert built[family]["proven"] == 2 * layers
    assert built[family]["layers"]["KV_CACHE_UPDATE"] == 2 * layers
    assert built[family]["plan_bytes"] > 100_000


@pytest.mark.parametrize("family", LAYERS)
def test_each_layer_has_one_attention_and_no_scatter(built: dict[str, Any], family: str) -> None:
    counted = built[family]["layers"]
    assert counted["ATTENTION_INPUT"] == counted["ATTENTION_OUTPUT"] == LAYERS[family]
    assert "SCATTER" not in counted


@pytest.mark.parametrize("family", LAYERS)
def test_bindings_say_what_is_static(built: dict[str, Any], family: str) -> None:
    """Rows and tokens are dynamic; heads, length and head_dim of a cache are not, though reshapes lose them on the way."""
    shapes = {binding["name"]: (binding["role"], binding["dtype"], binding["shape"]) for binding in built[family]["bindings"]}
    cache = [None, HEADS[family], 64, DIMS[family]]
    assert shapes["k_cache.0"] == shapes["v_cache.1.updated"] == ("cache", "float32", cache)
    assert shapes["input_ids"] == ("input", "int32", [None, None])
    assert shapes["write_start"] == ("input", "int32", [None])
    assert shapes["logits"][:2] == ("output", "float32")


def test_weights_are_inputs_and_tied_ones_are_one(built: dict[str, Any]) -> None:
    """No weight is in the plan: each is an input under its checkpoint name, the tied head under the embedding's."""
    llama = built["llama"]
    names = [binding["name"] for binding in llama["bindings"] if binding["role"] == "weight"]
    assert llama["constants"] == {name: name for name in names}
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert len(names) == len(set(names)) == 9 * LAYERS["llama"] + 2


def test_an_unproven_write_never_reaches_the_engine(built: dict[str, Any]) -> None:
    for family in LAYERS:
        assert "k_cache.0 without a proof" in built[family]["unproven"]


def test_progress_only_moves_on(built: dict[str, Any]) -> None:
    progress = built["llama"]["progress"]
    assert progress == sorted(progress)
    assert len(progress) > 2
    assert all(0 <= fraction <= 1 for fraction in progress)


def test_torch_is_left_as_it_was(built: dict[str, Any]) -> None:
    """What CUDA was asked while Torch-TensorRT was imported is answered by torch itself again."""
    assert built["llama"]["capability_asked_of"] == "torch.cuda"


@pytest.mark.slow
def test_a_gemma_3_of_26_layers_is_one_engine(tmp_path: Path) -> None:
    """The seed's own size: decode [1,1] and prefill [1,16], 52 of 52 caches in place, no operator without a converter."""
    gemma = build(tmp_path, "gemma3_26")["gemma3_26"]
    assert len(gemma["aliases"]) == gemma["proven"] == gemma["layers"]["KV_CACHE_UPDATE"] == 52
    assert gemma["layers"]["ATTENTION_INPUT"] == 26

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

from compiler_service.export.geometry import cache_spec
from compiler_service.export.program import export_decoder
from compiler_service.spec import profile_set
from shared.kv_spec import DType, Layout
from tests.support.decoders import tiny_config

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
    return build(tmp_path_factory.mktemp("plans"), "llama", "llama_paged", "llama_constant", "strided")


LAYERS, HEADS, HEAD_DIM = 2, 2, 16


def test_every_cache_is_aliased_by_a_layer_of_its_own(built: dict[str, Any]) -> None:
    llama = built["llama"]
    wanted = {f"{kind}_cache.{layer}" for kind in "kv" for layer in range(LAYERS)}
    assert llama["aliases"] == {cache: f"{cache}.updated" for cache in wanted}
    assert llama["proven"] == llama["layers"]["KV_CACHE_UPDATE"] == 2 * LAYERS
    assert llama["plan_bytes"] > 100_000


def test_a_pool_takes_keys_and_values_in_one_aliased_binding(built: dict[str, Any]) -> None:
    """The proof is the linear program's; its runs are cut at the pages' borders."""
    paged = built["llama_paged"]
    assert paged["aliases"] == {f"kv_pool.{layer}": f"kv_pool.{layer}.updated" for layer in range(LAYERS)}
    assert paged["proven"] == 2 * LAYERS
    assert paged["layers"]["KV_CACHE_UPDATE"] == LAYERS
    shapes = {binding["name"]: binding["shape"] for binding in paged["bindings"]}
    assert shapes["kv_pool.1"] == shapes["kv_pool.1.updated"] == [None, HEADS, 16, HEAD_DIM]
    assert shapes["block_table"] == [None, 4]
    assert shapes["packed_order"] == shapes["packed_ends"] == shapes["packed_offsets"] == [None]


@pytest.mark.parametrize("name", ["llama", "llama_paged"])
def test_each_layer_has_one_attention_and_no_scatter(built: dict[str, Any], name: str) -> None:
    counted = built[name]["layers"]
    assert counted["ATTENTION_INPUT"] == counted["ATTENTION_OUTPUT"] == LAYERS
    assert "SCATTER" not in counted


def test_bindings_say_what_is_static(built: dict[str, Any]) -> None:
    """Rows and tokens are dynamic; heads, length and head_dim of a cache are not, though reshapes lose them on the way."""
    shapes = {binding["name"]: (binding["role"], binding["dtype"], binding["shape"]) for binding in built["llama"]["bindings"]}
    assert shapes["k_cache.0"] == shapes["v_cache.1.updated"] == ("cache", "float32", [None, HEADS, 64, HEAD_DIM])
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
    assert len(names) == len(set(names)) == 9 * LAYERS + 2


def test_weights_have_the_names_that_inductor_reads_them_by(built: dict[str, Any]) -> None:
    """So one copy of a model's weights serves engines of both, and tests.bench.gpu_backends compares them on the same ones."""
    config = tiny_config("llama")
    cache = cache_spec(config, DType.FLOAT32, Layout.PAGED, 16, 64)
    program = export_decoder(config, cache, profile_set(("decode=1x1", "prefill=1x16")))
    assert set(program.weights.values()) == set(built["llama"]["constants"].values())


def test_a_plan_may_hold_its_weights(built: dict[str, Any]) -> None:
    """The same engine but for its weights, which are no inputs and nothing for a runtime to bind."""
    shared, own = built["llama"], built["llama_constant"]
    assert own["bindings"] == [binding for binding in shared["bindings"] if binding["role"] != "weight"]
    assert own["aliases"] == shared["aliases"]
    assert own["constants"] == {}
    assert own["missing"] == []
    assert len(own["missing_elsewhere"]) == own["count"] == 9 * LAYERS + 2


def test_an_unproven_write_never_reaches_the_engine(built: dict[str, Any]) -> None:
    assert "k_cache.0 without a proof" in built["llama"]["unproven"]


def test_a_write_without_a_proof_copies_if_the_caller_allows_it(built: dict[str, Any]) -> None:
    """The certificate says so, and why; the other cache is in place as ever, small as its program is (BR-004: writes and a sum)."""
    strided = built["strided"]
    assert strided["aliases"] == ["k_cache.0"]
    assert strided["roles"]["v_cache.0.updated"] == "output"
    assert strided["certificates"]["k_cache.0"] == [True, ""]
    aliased, reason = strided["certificates"]["v_cache.0"]
    assert not aliased
    assert "step 2" in reason
    assert any("1 copied: v_cache.0" in message for message in strided["told"])


def test_without_that_leave_the_job_ends_with_the_reason(built: dict[str, Any]) -> None:
    assert "1 of 2 are not proven" in built["strided"]["refused"]
    assert "v_cache.0: before lowering: refuted" in built["strided"]["refused"]


def test_an_exported_program_is_published_like_a_checkpoint(built: dict[str, Any]) -> None:
    """Its weights are a component of their own; its positions are its cells, which the runtime reads off the bindings."""
    strided = built["strided"]
    assert strided["facts"] == ["ExportedProgram", 300, 1]
    assert strided["constants"] == {"embed.weight": "embed.weight"}
    assert not strided["takes_positions"]


def test_one_plan_serves_several_targets(built: dict[str, Any]) -> None:
    assert built["strided"]["targets"] == ["sm80", "sm89", "sm120"]


def test_progress_only_moves_on(built: dict[str, Any]) -> None:
    progress = built["llama"]["progress"]
    assert progress == sorted(progress)
    assert len(progress) > 2
    assert all(0 <= fraction <= 1 for fraction in progress)


def test_torch_is_left_as_it_was(built: dict[str, Any]) -> None:
    """What CUDA was asked while Torch-TensorRT was imported is answered by torch itself again."""
    assert built["llama"]["capability_asked_of"] == "torch.cuda"


@pytest.mark.long
def test_a_gemma_3_of_26_layers_is_one_engine(tmp_path: Path) -> None:
    """The seed's own size: decode [1,1] and prefill [1,16], 52 of 52 caches in place, no operator without a converter."""
    gemma = build(tmp_path, "gemma3_26")["gemma3_26"]
    assert len(gemma["aliases"]) == gemma["proven"] == gemma["layers"]["KV_CACHE_UPDATE"] == 52
    assert gemma["layers"]["ATTENTION_INPUT"] == 26

"""What one process builds for the tests of the TensorRT backend: importing Torch-TensorRT takes ten seconds, so once is enough.

python -m tests.support.tensorrt_builds DIRECTORY NAME...       a summary as JSON on the last line of stdout
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.export import save
from transformers import PreTrainedConfig

from compiler_service import pipeline
from compiler_service.backends.tensorrt.host import without_gpu
from compiler_service.ingest.digest import DigestCache
from compiler_service.ingest.model import WEIGHTS_FILE
from compiler_service.pipeline import Workspace
from compiler_service.spec import CompileSpec, profile_set
from shared.artifacts.local import LocalStore
from shared.errors import WriteNotProven
from shared.kv_spec import Layout
from shared.manifest import decode_engine_manifest
from shared.tensorrt.files import PLAN_FILE
from tests.gpu.prepare_tensorrt import gemma3_of_26_layers
from tests.support.decoders import random_model, tiny_config
from tests.support.strided_step import VOCAB as STRIDED_VOCAB
from tests.support.strided_step import export_strided
from tests.support.tensorrt_engines import Lowered, build, lower, save_weights
from tests.support.tokenizers import byte_level_tokenizer

PROFILES = ("decode=1x1", "prefill=1x16")
MAX_LEN, PAGE_SIZE = 64, 16


def summary(config: PreTrainedConfig, directory: Path, page_size: int | None) -> dict[str, Any]:
    lowered = lower(config, PROFILES, MAX_LEN, page_size=page_size)
    answered = torch.cuda.get_device_capability.__module__
    directory.mkdir()
    progress: list[float] = []
    manifest = build(lowered, config, directory, progress)
    return {
        "proven": len(lowered.report.proven_nodes),
        "aliases": {alias.input: alias.output for alias in manifest.aliases},
        "bindings": [asdict(binding) for binding in manifest.bindings],
        "constants": manifest.constants,
        "layers": count_layers(lowered),
        "plan_bytes": (directory / "engine.plan").stat().st_size,
        "progress": progress,
        "capability_asked_of": answered,
        "unproven": "" if page_size else refusal_of_an_unproven_write(lowered),
    }


def missing_weights(model: Path, engine: Path) -> list[str]:
    """The weights of `model` whose bytes the plan of `engine` does not hold."""
    plan = (engine / PLAN_FILE).read_bytes()
    return [name for name, tensor in load_file(model / WEIGHTS_FILE).items() if tensor.numpy().tobytes() not in plan]


def constant_summary(config: PreTrainedConfig, directory: Path) -> dict[str, Any]:
    """The decoder `llama`, built before, with a plan that holds its weights."""
    directory.mkdir()
    lowered = lower(config, PROFILES, MAX_LEN)
    save_weights(lowered, random_model(config), directory / WEIGHTS_FILE)
    manifest = build(lowered, config, directory, constant_weights=True)
    return {
        "aliases": {alias.input: alias.output for alias in manifest.aliases},
        "bindings": [asdict(binding) for binding in manifest.bindings],
        "constants": manifest.constants,
        "missing": missing_weights(directory, directory),
        "missing_elsewhere": missing_weights(directory, directory.parent / "llama"),
        "count": len(lowered.program.weights),
    }


def copying_summary(directory: Path) -> dict[str, Any]:
    """A `.pt2` with one write that is a run and one that is not, through the whole pipeline: refused, then allowed to copy."""
    directory.mkdir()
    save(export_strided(), directory / "model.pt2")
    byte_level_tokenizer(STRIDED_VOCAB).save(str(directory / "tokenizer.json"))
    store = LocalStore(directory / "artifacts")
    workspace = Workspace(store, DigestCache(directory / "digests"), None)
    spec = CompileSpec(
        source=str(directory / "model.pt2"),
        backend="tensorrt_rtx",
        layout=Layout.LINEAR,
        dtype="float32",
        max_len=MAX_LEN,
        page_size=MAX_LEN,
        profiles=profile_set(("decode=1x1", "prefill=1x8")),
        targets=("sm80", "sm89", "sm120"),
        allow_copying=False,
        constant_weights=False,
    )
    told: list[str] = []
    refused = ""
    try:
        pipeline.build(spec, workspace, lambda stage, fraction, message: None, lambda: None)
    except WriteNotProven as error:
        refused = str(error)
    allowed = replace(spec, allow_copying=True)
    result = pipeline.build(allowed, workspace, lambda stage, fraction, message: told.append(message), lambda: None)
    with store.open(result.artifact_id) as artifact:
        manifest = decode_engine_manifest(artifact.manifest_bytes)
    return {
        "targets": manifest.target.compute_capabilities,
        "aliases": [alias.input for alias in manifest.aliases],
        "roles": {binding.name: binding.role for binding in manifest.bindings},
        "certificates": {c.cache: (c.aliased, c.reason) for c in manifest.proof},
        "facts": (manifest.model.architecture, manifest.model.vocab_size, manifest.model.num_layers),
        "constants": manifest.constants,
        "takes_positions": manifest.takes_positions,
        "refused": refused,
        "told": told,
    }


def refusal(lowered: Lowered) -> str:
    """What building without the caller's leave to copy says."""
    try:
        count_layers(lowered)
    except WriteNotProven as error:
        return str(error)
    return ""


def count_layers(lowered: Lowered) -> dict[str, int]:
    """How many layers of each type the network has."""
    with without_gpu():
        from compiler_service.backends.tensorrt.network import build_network
        from compiler_service.backends.tensorrt.plan import Builder

        builder = Builder()
        build_network(builder.network, lowered.program, lowered.report)
        network = builder.network
        return dict(Counter(str(network.get_layer(i).type).rpartition(".")[2] for i in range(network.num_layers)))


def refusal_of_an_unproven_write(lowered: Lowered) -> str:
    """What building says when the proof of one write is taken away."""
    first, *others = lowered.report.caches
    doubted = replace(first, after=replace(first.after, verdict="unknown: a test"))
    report = replace(lowered.report, caches=(doubted, *others))
    return refusal(replace(lowered, report=report))


if __name__ == "__main__":
    root = Path(sys.argv[1])
    configs = {"llama": lambda: tiny_config("llama"), "gemma3_26": gemma3_of_26_layers}
    built = {}
    for name in sys.argv[2:]:
        if name == "strided":
            built[name] = copying_summary(root / name)
            continue
        if name == "llama_constant":
            built[name] = constant_summary(configs["llama"](), root / name)
            continue
        family, paged, _ = name.partition("_paged")
        built[name] = summary(configs[family](), root / name, PAGE_SIZE if paged else None)
    print(json.dumps(built))

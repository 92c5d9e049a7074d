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
from transformers import PreTrainedConfig

from compiler_service.backends.tensorrt.host import without_gpu
from shared.errors import WriteNotProven
from tests.gpu.prepare_tensorrt import gemma3_of_26_layers
from tests.support.decoders import tiny_config
from tests.support.strided_step import strided_program
from tests.support.tensorrt_engines import Lowered, build, lower, lower_program

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


def copying_summary(directory: Path) -> dict[str, Any]:
    """A program with one write that is a run and one that is not."""
    lowered = lower_program(strided_program(), allow_copying=True)
    directory.mkdir()
    manifest = build(lowered, tiny_config("llama"), directory, capabilities=("sm80", "sm89", "sm120"))
    return {
        "targets": manifest.target.compute_capabilities,
        "aliases": [alias.input for alias in manifest.aliases],
        "roles": {binding.name: binding.role for binding in manifest.bindings},
        "certificates": {c.cache: (c.aliased, c.reason) for c in manifest.proof},
        "refused": refusal(lowered),
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
        family, paged, _ = name.partition("_paged")
        built[name] = summary(configs[family](), root / name, PAGE_SIZE if paged else None)
    print(json.dumps(built))

"""TensorRT-RTX beside Inductor on one GPU: the same two layers of an 8B shape, the same weights, steps, caches and bounds.

    python3 -m tests.bench.gpu_backends DIRECTORY [--out FILE.json]        DIRECTORY made by tests.bench.prepare_gpu_backends

Needs torch, transformers and the plans' TensorRT library; no torch_tensorrt. Weights are random, made on the device once; every
engine reads them, and must say what the others say. Slots of a linear pool are neighbours, so a step is one launch. Exit code 1
when an engine fails or disagrees.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime_service.engine.engine import Engine, EngineInputs
from runtime_service.engine.host import check_host
from runtime_service.engine.tensorrt.engine import TensorRTEngine, load_plan
from runtime_service.engine.weights import ModelWeights
from runtime_service.kv.pool import KVPool
from shared.gpu import compute_capability
from shared.kv_spec import DType, Layout
from shared.manifest import decode_engine_manifest
from shared.tensorrt.files import PLAN_FILE
from tests.bench.gpu import CONTEXT, Report, decode_row, matmul_rate, prefill
from tests.bench.gpu_cells import table_of
from tests.bench.machine import copy_bandwidth, gpu_alone
from tests.bench.random_engine import EngineShape, build_random_engine, llama_3_8b

CONFIG = llama_3_8b(2)
BATCHES, PREFILL = (1, 8, 32), 2048
MAX_LEN, PAGE = 4096, 32
PROFILES = (f"decode={BATCHES[-1]}x1", f"prefill=1x{PREFILL}")
CAPABILITIES = ("sm80", "sm89")
LEAST_COSINE = 0.99


def plan_directory(root: Path, layout: Layout, capability: str) -> Path:
    return root / f"{layout.value}_{capability}"


def load_planned(directory: Path, weights: ModelWeights) -> TensorRTEngine:
    """The engine of a plan and its manifest, reading the weights it names."""
    manifest = decode_engine_manifest((directory / "manifest.json").read_bytes())
    check_host(manifest)
    bound = {constant: weights.tensors[name] for constant, name in manifest.constants.items()}
    return TensorRTEngine(manifest, load_plan(manifest, directory / PLAN_FILE, bound), weights, ExitStack())


def sample_logits(engine: Engine, device: str, rows: int = 4, tokens: int = 100) -> Tensor:
    """Logits `[2 * rows, vocab]` on the host: random prompts of `tokens` tokens one after the other, then one step of all rows."""
    spec = engine.manifest.cache
    pool = KVPool(spec, 1 + rows * spec.pages_for(tokens + 1), device)
    table = table_of(spec, rows, tokens + 1, pool.num_pages)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(engine.manifest.model.vocab_size, (rows, tokens + 1), dtype=torch.int32, generator=generator)

    def step(profile: str, chosen: slice, start: int, count: int) -> Tensor:
        batch = len(ids[chosen])
        starts = torch.full((batch,), start, dtype=torch.int32)
        positions = starts[:, None] + torch.arange(count, dtype=torch.int32)
        last = torch.full((batch,), count - 1, dtype=torch.int32)
        new = ids[chosen, start : start + count].contiguous()
        return engine.run(EngineInputs(profile, new, positions, starts, last, table[chosen]), pool).cpu()

    prompts = [step("prefill", slice(row, row + 1), 0, tokens) for row in range(rows)]
    return torch.cat([*prompts, step("decode", slice(rows), tokens, 1)])


def figures(engine: Engine, copy: float, rate: float) -> dict[str, Any]:
    """Each batch over a pool of its size: every slot of a linear one is in the batch."""
    spec = engine.manifest.cache

    def pool(batch: int) -> KVPool:
        return KVPool(spec, 1 + batch * spec.pages_for(max(CONTEXT + 1, PREFILL)), "cuda")

    decode = {str(batch): decode_row(engine, pool(batch), batch, copy) for batch in BATCHES}
    return {"decode": decode, "prefill": prefill(engine, pool(1), rate, PREFILL)}


def measure_plans(root: Path, weights: ModelWeights, wanted: Tensor, bounds: tuple[float, float], report: Report) -> None:
    """Every plan, one after the other, with its least cosine to the `wanted` sample logits."""

    def measured(directory: Path) -> Callable[[], dict[str, Any]]:
        def measure() -> dict[str, Any]:
            engine = load_planned(directory, weights)
            try:
                cosine = torch.cosine_similarity(sample_logits(engine, "cuda"), wanted, dim=-1).min().item()
                return {"least_cosine": cosine, "toolchain": engine.manifest.toolchain, **figures(engine, *bounds)}
            finally:
                engine.close()

        return measure

    for layout in Layout:
        for capability in CAPABILITIES:
            directory = plan_directory(root, layout, capability)
            report.section(f"tensorrt_rtx {layout.value} {capability}", measured(directory))


def table(results: dict[str, Any]) -> list[str]:
    """A line an engine: milliseconds and share of the roofline at each batch, of a prefill and its share of the matrix rate."""
    width = max(map(len, results))
    heads = [*(f"decode batch {batch}" for batch in BATCHES), f"prefill {PREFILL}"]
    lines = [f"{'':{width}}" + "".join(f"{head:>22}" for head in heads) + f"{'least cosine':>14}"]
    for name, result in results.items():
        if "failed" in result:
            lines.append(f"{name:{width}}  {result['failed'].splitlines()[-1]}")
            continue
        cells = [(row["ms"], row["of_roofline"]) for row in result["decode"].values()]
        cells.append((result["prefill"]["ms"], result["prefill"]["of_matmul_rate"]))
        shown = "".join(f"{f'{ms:.3f} ms {share:5.1%}':>22}" for ms, share in cells)
        lines.append(f"{name:{width}}{shown}{result.get('least_cosine', 1.0):>14.6f}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--out", type=Path, default=Path("tests/bench/results/gpu_backends.json"))
    arguments = parser.parse_args()
    report = Report(arguments.out)
    shape = EngineShape(CONFIG, DType.BFLOAT16, MAX_LEN, PAGE, PROFILES, compute_capability())
    with tempfile.TemporaryDirectory() as scratch:
        inductor, weights = build_random_engine(shape, Path(scratch))
        with gpu_alone():
            copy = report.section("copy_bytes_per_s", lambda: copy_bandwidth(torch.device("cuda")))
            rate = report.section("matmul_per_s", matmul_rate)
            wanted = sample_logits(inductor, "cuda")
            report.section("inductor paged", lambda: figures(inductor, copy, rate))
            measure_plans(arguments.directory, weights, wanted, (copy, rate), report)
    results = {name: result for name, result in report.figures.items() if isinstance(result, dict)}
    print(f"copy {copy / 1e9:.0f} GB/s, bf16 matrices {rate / 1e12:.0f} TFLOP/s, context {CONTEXT}, {torch.cuda.get_device_name()}")
    print("\n".join(table(results)))
    sound = all("failed" not in r and r.get("least_cosine", 1.0) >= LEAST_COSINE for r in results.values())
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())

"""`make bench-gpu`: an 8B-shaped decoder on one GPU, engine and service, beside the card's own bounds and `transformers`.

    python -m tests.bench.gpu [--out FILE.json] [--layers N] [--skip-baseline]

Weights are random, made on the device. Every figure is measured in this one run; ratios are of figures of the run. A section that
fails is reported with its traceback and does not stop the others. Plots are written beside the JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from runtime_service.engine.engine import Engine
from runtime_service.kv.pool import KVPool
from shared.gpu import compute_capability
from shared.kv_spec import DType
from tests.bench.gpu_cells import PageWatch, bare_decode, bare_prefill, like_requests, mixed_load, served_decode
from tests.bench.gpu_plots import plot_decode, plot_pages
from tests.bench.machine import copy_bandwidth, gpu_alone, write_json
from tests.bench.random_engine import EngineShape, build_random_engine, llama_3_8b
from tests.bench.served import serve

BATCHES = (1, 8, 32, 64)
HIDDEN = llama_3_8b().hidden_size
CONTEXT, PREFILL = 2048, 4096
PROMPT, GENERATED, BUDGET, INTERVAL = 512, 8192, 2048, 128
ROUNDS = {"budget": BUDGET, "interval": INTERVAL}
MAX_LEN, PAGE = 9216, 32
DENSE_BATCH, COMPACTED_BATCH = 32, 128
"""What the same pool holds: 32 sequences of 8,704 entries, or 128 of 2,176 and a page each."""
NUM_PAGES = 1 + COMPACTED_BATCH * ((BUDGET + INTERVAL) // PAGE + 1)


class Report:
    """Figures by section; written after each, so that a run that is cut off leaves what it had."""

    def __init__(self, out: Path) -> None:
        self.out, self.figures = out, {}
        self.started = time.perf_counter()

    def section(self, name: str, measure: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        try:
            self.figures[name] = measure()
        except Exception:  # noqa: BLE001 - one section's failure must not lose the others
            self.figures[name] = {"failed": traceback.format_exc()}
        print(f"[{time.perf_counter() - self.started:6.1f} s] {name}: {time.perf_counter() - begin:.1f} s", flush=True)
        write_json(self.out, self.figures)
        return self.figures[name]


def matmul_rate() -> float:
    """bf16 operations a second of a product of 8192 x 8192 random matrices."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(20):
        a @ b
    torch.cuda.synchronize()
    return 20 * 2 * 8192**3 / (time.perf_counter() - started)


def read_bytes(engine: Engine) -> int:
    """Weights a decode step reads: all but the embedding, of which it reads a row a token."""
    model = engine.manifest.model
    return model.weights_bytes - model.vocab_size * HIDDEN * 2


def decode_row(engine: Engine, pool: KVPool, batch: int, copy: float) -> dict[str, float]:
    seconds = min(bare_decode(engine, pool, batch, CONTEXT, 60) for _ in range(2))
    floor = (read_bytes(engine) + batch * CONTEXT * pool.spec.token_bytes) / copy
    return {"ms": seconds * 1e3, "tokens_per_s": batch / seconds, "of_roofline": floor / seconds}


def prefill(engine: Engine, pool: KVPool, rate: float, tokens: int = PREFILL) -> dict[str, float]:
    seconds = bare_prefill(engine, pool, tokens, 5)
    model = engine.manifest.model
    projections = 2 * tokens * (read_bytes(engine) // 2 - model.vocab_size * HIDDEN)
    attention = 2 * 2 * model.num_layers * HIDDEN * tokens**2 // 2
    return {"ms": seconds * 1e3, "tokens_per_s": tokens / seconds, "of_matmul_rate": (projections + attention) / seconds / rate}


async def service(engine: Engine, data: Path, report: Report, generated: int, mixed_s: float) -> None:
    vocab = engine.manifest.model.vocab_size
    loop = asyncio.get_running_loop()

    def measured(name: str, coroutine: Any) -> Any:
        return loop.run_in_executor(None, report.section, name, lambda: asyncio.run_coroutine_threadsafe(coroutine, loop).result())

    async with serve(engine, data, NUM_PAGES) as served:
        await measured("warm_up", served_decode(served, like_requests(COMPACTED_BATCH, vocab, 40, 12)))
        await measured("first_rounds", served_decode(served, like_requests(1, vocab, BUDGET + 2 * INTERVAL, 8, **ROUNDS)))
        await measured("service", served_decode(served, like_requests(DENSE_BATCH, vocab, CONTEXT - 192, 384)))
        runs = {"dense": (DENSE_BATCH, {}), "compacted": (COMPACTED_BATCH, ROUNDS), "compacted_equal": (DENSE_BATCH, ROUNDS)}
        for name, (batch, rounds) in runs.items():
            with PageWatch(served, period_s=0.5) as pages:
                await measured(name, served_decode(served, like_requests(batch, vocab, PROMPT, generated, **rounds)))
            report.figures[f"{name}_pages"] = pages
        rng = random.Random(1)
        wanted = [
            {"seed": i, "vocab": vocab, "prompt_len": rng.randint(8, 1500), "max_tokens": rng.randint(16, 256),
             "delay_s": rng.uniform(0, mixed_s)} | ({"budget": 256, "interval": 64} if i % 3 == 0 else {})
            for i in range(200)
        ]  # fmt: skip
        await measured("mixed_load", mixed_load(served, wanted))


def long_generation(figures: dict[str, Any]) -> dict[str, float]:
    """Tokens a second with rounds over those without: with as many sequences as the same pool holds of each, and with as many."""
    dense = figures["dense"]["tokens_per_s"]
    return {
        "over_dense_same_bytes": figures["compacted"]["tokens_per_s"] / dense,
        "over_dense_equal_batch": figures["compacted_equal"]["tokens_per_s"] / dense,
    }


def overhead(figures: dict[str, Any]) -> float:
    """What the service adds to the bare loop at batch 32 and the served streams' mean context."""
    return figures["bare_tokens_per_s"] / figures["service"]["tokens_per_s"] - 1


class Baselines:
    """transformers in processes of their own, compiling while we do and measuring when told to."""

    def __init__(self, groups: Sequence[str], layers: int) -> None:
        command = [
            sys.executable,
            "-m",
            "tests.bench.gpu_baseline",
            "--layers",
            str(layers),
            "--context",
            str(CONTEXT),
            "--batches",
        ]
        self.processes = [
            subprocess.Popen([*command, *batches.split(",")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for batches in groups
        ]

    def ready(self) -> list[str]:
        return [process.stdout.readline().strip() for process in self.processes]

    def measure(self) -> dict[str, float]:
        """Milliseconds a step by batch; one process after the other."""
        steps: dict[str, float] = {}
        for process in self.processes:
            out, _ = process.communicate("go\n")
            steps |= {batch: seconds * 1e3 for batch, seconds in json.loads(out.splitlines()[-1]).items()}
        return steps


def engine_figures(engine: Engine, report: Report) -> None:
    """What the engine does alone; its pool is given back, for the service has its own."""
    copy_rate = report.section("copy_bytes_per_s", lambda: copy_bandwidth(torch.device("cuda")))
    rate = report.section("matmul_per_s", matmul_rate)
    pool = KVPool(engine.manifest.cache, NUM_PAGES, "cuda")
    report.section("decode", lambda: {str(batch): decode_row(engine, pool, batch, copy_rate) for batch in BATCHES})
    report.section("prefill", lambda: prefill(engine, pool, rate))
    context = CONTEXT + 50  # 100 steps around the mean of the served streams
    report.section("bare_tokens_per_s", lambda: DENSE_BATCH / bare_decode(engine, pool, DENSE_BATCH, context, 100))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("tests/bench/results/gpu.json"))
    parser.add_argument("--layers", type=int, default=32, help="fewer compile sooner; their ratios are not the whole model's")
    parser.add_argument("--baseline", nargs="*", default=["1,64", "8,32"], help="batches of each transformers process")
    parser.add_argument("--generated", type=int, default=GENERATED, help="tokens of the long generation")
    parser.add_argument("--mixed-s", type=float, default=60.0, help="seconds over which 200 random requests arrive")
    arguments = parser.parse_args()
    report = Report(arguments.out)
    baselines = Baselines(arguments.baseline, arguments.layers) if arguments.baseline else None
    profiles = (f"decode={COMPACTED_BATCH}x1", f"prefill=1x{PREFILL}")
    shape = EngineShape(llama_3_8b(arguments.layers), DType.BFLOAT16, MAX_LEN, PAGE, profiles, compute_capability())
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "engine"
        directory.mkdir()
        started = time.perf_counter()
        engine, _ = build_random_engine(shape, directory)
        report.section("build_s", lambda: time.perf_counter() - started)
        if baselines is not None:
            report.section("baseline_ready", baselines.ready)
        with gpu_alone():
            engine_figures(engine, report)
            torch.cuda.empty_cache()
            asyncio.run(service(engine, Path(scratch) / "data", report, arguments.generated, arguments.mixed_s))
            report.section("long_generation", lambda: long_generation(report.figures))
            report.section("service_adds", lambda: overhead(report.figures))
            if baselines is not None:
                report.section("transformers_ms", baselines.measure)
    report.section("plots", lambda: [plot_decode(report.figures, arguments.out), plot_pages(report.figures, arguments.out)])
    print(json.dumps({k: v for k, v in report.figures.items() if not k.endswith("pages")}, indent=1))


if __name__ == "__main__":
    main()

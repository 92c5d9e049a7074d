"""Ten minutes of mixed load on one GPU: `python -m tests.bench.gpu_soak [--seconds S] [--out FILE.json]`.

A few layers of the 8B shape behind the runtime as its process has it. Requests arrive at random, after a burst that fills a batch:
prompts of 8 to 1,500 tokens, 16 to 256 generated, every third with rounds, every seventh from a client that leaves. Exit code 1 for
an error, a page that did not come back, or device memory that grew after the first tenth of the time.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from runtime_service.engine.engine import Engine
from shared.gpu import compute_capability
from shared.kv_spec import DType
from tests.bench.gpu_cells import mixed_load
from tests.bench.machine import gpu_alone, write_json
from tests.bench.random_engine import EngineShape, build_random_engine, llama_3_8b
from tests.bench.served import Served, serve

MAX_LEN, PAGE, NUM_PAGES = 2048, 32, 1500
PROFILES = ("decode=64x1", "prefill=2x1024")
BURST, REQUESTS_A_SECOND = 80, 12.0
SAMPLE_S = 5.0


def requests(seconds: float, vocab: int) -> list[dict[str, Any]]:
    rng = random.Random(1)
    wanted = []
    for i in range(BURST + int(seconds * REQUESTS_A_SECOND)):
        request = {"seed": i, "vocab": vocab, "prompt_len": rng.randint(8, 1500), "max_tokens": rng.randint(16, 256)}
        request |= {"delay_s": 0.0 if i < BURST else rng.uniform(0, seconds)}
        request |= {"budget": 256, "interval": 64} if i % 3 == 0 else {}
        wanted.append(request | ({"leave_after": rng.randint(1, 15)} if i % 7 == 0 else {}))
    return wanted


async def sample_memory(served: Served, samples: list[dict[str, float]]) -> None:
    """Until cancelled: seconds, bytes of the device in use by anybody and held by torch, pages in use, requests alive."""
    began = time.perf_counter()
    while True:
        load = served.load()
        free, total = torch.cuda.mem_get_info()
        samples.append(
            {
                "s": time.perf_counter() - began,
                "device_bytes": total - free,
                "torch_bytes": torch.cuda.memory_reserved(),
                "pages": load.pages_total - load.pages_free,
                "requests": load.requests_running + load.requests_waiting,
            }
        )
        await asyncio.sleep(SAMPLE_S)


async def soak(seconds: float, layers: int, data: Path) -> dict[str, Any]:
    directory = data / "engine"
    directory.mkdir()
    shape = EngineShape(llama_3_8b(layers), DType.BFLOAT16, MAX_LEN, PAGE, PROFILES, compute_capability())
    engine, _ = build_random_engine(shape, directory)
    with gpu_alone():
        report, samples = await serve_load(engine, data / "data", seconds)
    settled = samples[len(samples) // 10 :]
    grown = {key: settled[-1][key] - settled[0][key] for key in ("device_bytes", "torch_bytes")}
    return report | {"seconds": seconds, "grown_after_a_tenth": grown, "samples": samples}


async def serve_load(engine: Engine, data: Path, seconds: float) -> tuple[dict[str, Any], list[dict[str, float]]]:
    async with serve(engine, data, NUM_PAGES) as served:
        samples: list[dict[str, float]] = []
        sampling = asyncio.create_task(sample_memory(served, samples))
        report = await mixed_load(served, requests(seconds, engine.manifest.model.vocab_size))
        sampling.cancel()
    return report, samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("tests/bench/results/gpu_soak.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        report = asyncio.run(soak(arguments.seconds, arguments.layers, Path(scratch)))
    write_json(arguments.out, report)
    print({key: value for key, value in report.items() if key != "samples"})
    sound = not report["errors"] and not report["pages_missing"] and not report["pages_leaked"]
    sys.exit(not (sound and report["grown_after_a_tenth"]["device_bytes"] <= 0))


if __name__ == "__main__":
    main()

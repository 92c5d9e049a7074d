"""`transformers` decoding a shape with StaticCache under torch.compile with CUDA graphs: `python -m tests.bench.gpu_baseline`.

Compiles everything, prints `ready`, waits for a line, then measures and prints {batch: seconds a step}. A static cache is attended
to in its whole length whatever it holds, so nothing is prefilled.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, StaticCache

from tests.bench.random_engine import llama_3_8b
from tests.support.hf_cache import cache_name

WARM_UPS, STEPS = 4, 30


class Baseline:
    def __init__(self, config: PreTrainedConfig, context: int, device: str) -> None:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        self.model = model.eval().requires_grad_(False)
        self.cache_name = cache_name(model.forward)
        self.step = torch.compile(self._step, mode="reduce-overhead", dynamic=False)
        self.context, self.device = context, device
        self.caches: dict[int, StaticCache] = {}

    def _step(self, ids: torch.Tensor, position: torch.Tensor, cache: StaticCache) -> torch.Tensor:
        logits = self.model(input_ids=ids, position_ids=position, **{self.cache_name: cache}, use_cache=True).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    @torch.inference_mode()
    def run(self, batch: int, steps: int) -> float:
        """Seconds a step."""
        cache = self.caches.get(batch)
        if cache is None:
            cache = self.caches[batch] = StaticCache(config=self.model.config, max_cache_len=self.context)
            self.model(torch.zeros(batch, 1, dtype=torch.int64, device=self.device), **{self.cache_name: cache}, use_cache=True)
        ids = torch.zeros(batch, 1, dtype=torch.int64, device=self.device)
        position = torch.full((batch, 1), self.context - 1, device=self.device)
        _wait(self.device)
        started = time.perf_counter()
        for _ in range(steps):
            torch.compiler.cudagraph_mark_step_begin()
            ids = self.step(ids, position, cache).clone()
        _wait(self.device)
        return (time.perf_counter() - started) / steps


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", required=True)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--layers", type=int, required=True)
    arguments = parser.parse_args()
    baseline = Baseline(llama_3_8b(arguments.layers), arguments.context, "cuda")
    for batch in arguments.batches:
        baseline.run(batch, WARM_UPS)
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps({batch: min(baseline.run(batch, STEPS) for _ in range(3)) for batch in arguments.batches}), flush=True)


if __name__ == "__main__":
    main()

"""What `make bench-gpu` measures, one function a figure, over any engine: tests run them on the CPU with a tiny one."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch

from runtime_service.engine.engine import Engine, EngineInputs
from runtime_service.kv.pool import KVPool
from shared.kv_spec import KVCacheSpec
from tests.bench.served import Served

_SEEDS = itertools.count(1_000_000)


def wait(pool: KVPool) -> None:
    if pool.device.type == "cuda":
        torch.cuda.synchronize()


def table_of(spec: KVCacheSpec, batch: int, tokens: int, num_pages: int) -> torch.Tensor:
    """Every row its own pages, none next to another, in a pool of `num_pages`."""
    width = spec.pages_for(tokens)
    assert batch * width < num_pages, f"{batch} rows of {tokens} tokens need {batch * width} pages beside the dump page"
    order = 1 + torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(1))
    return order[: batch * width].to(torch.int32).view(batch, width)


def bare_decode(engine: Engine, pool: KVPool, batch: int, context: int, steps: int) -> float:
    """Seconds a step of a loop that only runs the engine, each step on the tokens of the last; `context` when the last one runs."""
    table = table_of(pool.spec, batch, context + 1, pool.num_pages)
    last = torch.zeros(batch, dtype=torch.int32)
    ids = torch.zeros(batch, 1, dtype=torch.int32, device=pool.device)
    warm_ups = 3
    for step in range(-warm_ups, steps):
        if step == 0:
            wait(pool)
            started = time.perf_counter()
        start = torch.full((batch,), context - steps + max(step, 0), dtype=torch.int32)
        logits = engine.run(EngineInputs("decode", ids, start[:, None].contiguous(), start, last, table), pool)
        ids = logits.argmax(-1, keepdim=True).to(torch.int32)
    wait(pool)
    return (time.perf_counter() - started) / steps


def bare_prefill(engine: Engine, pool: KVPool, tokens: int, repeats: int) -> float:
    """Seconds of one prefill of `tokens` tokens, the median of `repeats`."""
    table = table_of(pool.spec, 1, tokens, pool.num_pages)
    ids = torch.randint(0, engine.manifest.model.vocab_size, (1, tokens), dtype=torch.int32)
    position = torch.arange(tokens, dtype=torch.int32)[None]
    inputs = EngineInputs(
        "prefill", ids, position, torch.zeros(1, dtype=torch.int32), torch.tensor([tokens - 1], dtype=torch.int32), table
    )
    times = []
    for _ in range(repeats + 1):
        wait(pool)
        started = time.perf_counter()
        engine.run(inputs, pool)
        wait(pool)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


@dataclass
class PageWatch:
    """Pages in use over time, sampled while it is entered."""

    served: Served
    period_s: float = 0.05

    def __enter__(self) -> list[tuple[float, int]]:
        self._samples: list[tuple[float, int]] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self._samples

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        started = time.perf_counter()
        while not self._done.wait(self.period_s):
            load = self.served.load()
            self._samples.append((time.perf_counter() - started, load.pages_total - load.pages_free))


def latencies(results: list[dict[str, Any]]) -> dict[str, float]:
    """Time to first token and between tokens, and the rate while every stream decodes. Seconds; tokens a second."""
    assert not [r["error"] for r in results if r["error"]], results[0]["error"]
    first = sorted(r["arrivals"][0][0] - r["sent"] for r in results)
    gaps = sorted(b[0] - a[0] for r in results for a, b in zip(r["arrivals"], r["arrivals"][1:], strict=False))
    begin, end = max(r["arrivals"][0][0] for r in results), min(r["arrivals"][-1][0] for r in results)
    tokens = sum(count for r in results for moment, count in r["arrivals"] if begin < moment <= end)
    return {
        "ttft_p50": _at(first, 0.5),
        "ttft_p99": _at(first, 0.99),
        "inter_token_p50": _at(gaps, 0.5),
        "inter_token_p99": _at(gaps, 0.99),
        "tokens_per_s": tokens / (end - begin),
    }


def _at(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def like_requests(batch: int, vocab: int, prompt_len: int, max_tokens: int, **kv: int) -> list[dict[str, Any]]:
    """Requests of one shape; no two that this process makes begin alike, so no prompt is found computed."""
    common = {"vocab": vocab, "prompt_len": prompt_len, "max_tokens": max_tokens, **kv}
    return [{"seed": next(_SEEDS), **common} for _ in range(batch)]


async def served_decode(served: Served, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """The requests' latencies, their rounds, and what share of the time the rounds took."""
    before, started = served.load().compaction, time.perf_counter()
    results = await served.clients(*requests)
    took = time.perf_counter() - started
    after = served.load().compaction
    figures: dict[str, Any] = latencies(results)
    figures["rounds"] = after.rounds - before.rounds
    figures["round_share"] = (after.duration_s - before.duration_s) / took
    return figures


async def mixed_load(served: Served, requests: list[dict[str, Any]], expected: list[list[int]] | None = None) -> dict[str, Any]:
    """Errors, pages that did not come back, and the device memory before and after; with `expected`, wrong answers too."""
    memory = _reserved()
    results = await served.clients(*requests)
    load = served.load()
    return {
        "requests": len(results),
        "tokens": sum(len(r["tokens"]) for r in results),
        "errors": [r["error"] for r in results if r["error"]],
        "wrong": [i for i, r in enumerate(results) if r["tokens"] != expected[i]] if expected is not None else None,
        "pages_missing": load.pages_total - load.pages_free,
        "pages_leaked": load.pages_leaked,
        "preemptions": load.preemptions,
        "device_bytes_before": memory,
        "device_bytes_after": _reserved(),
    }


def _reserved() -> int:
    return torch.cuda.memory_reserved() if torch.cuda.is_available() else 0

"""`make bench-cpu`: decode and prefill of SmolLM2-135M (float32) through gRPC, in a bare engine loop and in eager transformers; and
the time to the first token of a prompt that was asked before beside one that was not.

All variants run in one process tree, round after round in turn, so that their ratios see the same machine. The roofline is the
bandwidth of a float32 matrix-vector product over a matrix far larger than the caches, measured in every round too.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import torch
from transformers import StaticCache

from runtime_service.engine.engine import Engine, EngineInputs
from runtime_service.engine.loader import EngineLoader
from runtime_service.kv.pool import KVPool
from shared.artifacts.local import LocalStore
from shared.cli.fetch import fetch_smollm2
from shared.pb.quire.v1 import inference_pb2_grpc
from tests.bench.machine import write_json
from tests.e2e.conftest import CACHE, DATA, Quire, greedy_request, start_quire, stop_quire
from tests.e2e.hf_oracle import load_model
from tests.support.hf_cache import cache_name

BATCHES = (1, 4, 8)
PROMPT, NEW = 128, 48
PREFILL, CHUNK = 512, 128
ROUNDS = 3
NUM_PAGES = 512


def read_bandwidth() -> float:
    """Bytes a second of a float32 GEMV over 512 MiB."""
    matrix, vector = torch.ones(8192, 16384), torch.ones(16384)
    matrix @ vector
    times = []
    for _ in range(5):
        started = time.perf_counter()
        matrix @ vector
        times.append(time.perf_counter() - started)
    return matrix.nbytes / min(times)


class BareLoop:
    """The engine driven by a loop that does nothing else: what the service's rates are compared with."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.spec = engine.manifest.cache
        self.pool = KVPool(self.spec, NUM_PAGES)

    def _step(self, profile: str, ids: torch.Tensor, start: int, table: torch.Tensor) -> torch.Tensor:
        batch, length = ids.shape
        position = torch.arange(start, start + length, dtype=torch.int32).expand(batch, length).contiguous()
        starts = torch.full((batch,), start, dtype=torch.int32)
        last = torch.full((batch,), length - 1, dtype=torch.int32)
        return self.engine.run(EngineInputs(profile, ids, position, starts, last, table), self.pool)

    def _table(self, batch: int, tokens: int) -> torch.Tensor:
        width = self.spec.pages_for(tokens)
        return (1 + torch.arange(batch * width, dtype=torch.int32)).view(batch, width)

    def prefill(self, tokens: int) -> float:
        table, ids = self._table(1, tokens), torch.randint(0, 1000, (1, tokens), dtype=torch.int32)
        started = time.perf_counter()
        for first in range(0, tokens, CHUNK):
            self._step("prefill", ids[:, first : first + CHUNK].contiguous(), first, table)
        return tokens / (time.perf_counter() - started)

    def decode(self, batch: int) -> float:
        table = self._table(batch, PROMPT + NEW)
        for row in range(batch):
            ids = torch.randint(0, 1000, (1, PROMPT), dtype=torch.int32)
            logits = self._step("prefill", ids, 0, table[row : row + 1])
        tokens = logits.argmax(-1).to(torch.int32).repeat(batch)[:, None]
        started = time.perf_counter()
        for step in range(NEW):
            tokens = self._step("decode", tokens, PROMPT + step, table).argmax(-1).to(torch.int32)[:, None]
        return batch * NEW / (time.perf_counter() - started)


class Eager:
    """transformers with StaticCache of the same length, its default attention."""

    def __init__(self, directory: Path) -> None:
        self.model = load_model(directory)

    @torch.inference_mode()
    def prefill(self, tokens: int) -> float:
        cache = StaticCache(config=self.model.config, max_cache_len=tokens)
        cached = {cache_name(self.model.forward): cache}
        ids = torch.randint(0, 1000, (1, tokens))
        started = time.perf_counter()
        self.model(input_ids=ids, **cached, use_cache=True, logits_to_keep=1)
        return tokens / (time.perf_counter() - started)

    @torch.inference_mode()
    def decode(self, batch: int) -> float:
        cache = StaticCache(config=self.model.config, max_cache_len=PROMPT + NEW)
        cached = {cache_name(self.model.forward): cache}
        logits = self.model(input_ids=torch.randint(0, 1000, (batch, PROMPT)), **cached, use_cache=True, logits_to_keep=1).logits
        started = time.perf_counter()
        for step in range(NEW):
            ids = logits[:, -1].argmax(-1)[:, None]
            position = torch.full((batch, 1), PROMPT + step)
            logits = self.model(input_ids=ids, position_ids=position, **cached, use_cache=True, logits_to_keep=1).logits
        return batch * NEW / (time.perf_counter() - started)


class Service:
    """The same through gRPC: one client, all streams on its one channel; the rate counts tokens while all streams decode."""

    def __init__(self, quire: Quire, engine: str) -> None:
        self.quire, self.engine = quire, engine

    def prefill(self, tokens: int) -> float:
        return tokens / self.first_token(random_ids(tokens))

    def first_token(self, ids: list[int]) -> float:
        """Seconds."""
        started = time.perf_counter()
        ((first, *_),) = asyncio.run(self._arrivals([ids], 1))
        return first - started

    def decode(self, batch: int) -> float:
        arrivals = asyncio.run(self._arrivals([random_ids(PROMPT) for _ in range(batch)], NEW + 8))
        begin, end = max(row[0] for row in arrivals), min(row[-1] for row in arrivals)
        return sum(begin < moment <= end for row in arrivals for moment in row) / (end - begin)

    async def _arrivals(self, prompts: list[list[int]], new: int) -> list[list[float]]:
        """When each token of each stream came in."""
        async with grpc.aio.insecure_channel(self.quire.session.runtime_address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)

            async def read(prompt: list[int]) -> list[float]:
                request = greedy_request(self.engine, prompt, new)
                return [time.perf_counter() async for event in stub.Generate(request) for _ in event.delta.token_ids]

            return await asyncio.gather(*(read(prompt) for prompt in prompts))


def random_ids(count: int) -> list[int]:
    """A prompt that begins like no other, so that none of it is found in the prefix cache."""
    return torch.randint(0, 1000, (count,)).tolist()


def measure_hits(service: Service) -> dict[str, float]:
    """Median seconds to the first token of a prompt: asked for the first time, and again."""
    prompts = [random_ids(PREFILL) for _ in range(ROUNDS + 1)]
    missed, hit = zip(*((service.first_token(ids), service.first_token(ids)) for ids in prompts), strict=True)
    return {"missed": statistics.median(missed[1:]), "hit": statistics.median(hit[1:])}


def measure(variants: dict[str, BareLoop | Eager | Service]) -> dict[str, dict[str, float]]:
    """Medians over interleaved rounds: cell -> variant -> tokens a second; the row `bandwidth` holds bytes a second."""
    cells: dict[str, Callable[[BareLoop | Eager | Service], float]] = {
        **{f"decode {batch}": lambda v, batch=batch: v.decode(batch) for batch in BATCHES},
        f"prefill {PREFILL}": lambda v: v.prefill(PREFILL),
    }
    seen: dict[str, dict[str, list[float]]] = {cell: {name: [] for name in variants} for cell in cells}
    bandwidth: list[float] = []
    for round_number in range(ROUNDS + 1):
        rate = read_bandwidth()
        for cell, run in cells.items():
            for name, variant in variants.items():
                got = run(variant)
                if round_number:  # the first round warms up
                    seen[cell][name].append(got)
        if round_number:
            bandwidth.append(rate)
    medians = {cell: {name: statistics.median(rates) for name, rates in row.items()} for cell, row in seen.items()}
    return medians | {"bandwidth": {"bytes/s": statistics.median(bandwidth)}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("tests/bench/results/cpu.json"))
    out = parser.parse_args().out
    (DATA / "runtime-engines.json").unlink(missing_ok=True)
    quire = start_quire(DATA)
    try:
        artifact = quire.artifact(quire.compile(fetch_smollm2(CACHE)).artifact_id)
        store = LocalStore(DATA / "artifacts")
        engine = EngineLoader().load(store.open(artifact.artifact_id), store.open(artifact.model_id))
        with store.open(artifact.model_id) as model:
            eager = Eager(model.path("config.json").parent)
        quire.load(artifact.artifact_id, "bench", NUM_PAGES)
        service = Service(quire, "bench")
        results = measure({"grpc": service, "bare": BareLoop(engine), "eager": eager})
        hits = measure_hits(service)
        weights = engine.manifest.model.weights_bytes
    finally:
        stop_quire(quire)
    bandwidth = results["bandwidth"]["bytes/s"]
    print(f"{'tokens/s':<14}{'grpc':>9}{'bare':>9}{'eager':>9}{'roofline':>10}{'bare/eager':>12}{'bare/roof':>11}{'grpc/bare':>11}")
    for cell, row in results.items():
        if cell == "bandwidth":
            continue
        roof = float("nan")
        if cell.startswith("decode"):
            batch = int(cell.split()[1])
            kv = batch * (PROMPT + NEW / 2) * engine.manifest.cache.token_bytes
            roof = batch * bandwidth / (weights + kv)
            row["roofline"] = roof
        print(
            f"{cell:<14}{row['grpc']:>9.1f}{row['bare']:>9.1f}{row['eager']:>9.1f}{roof:>10.1f}"
            f"{row['bare'] / row['eager']:>12.2f}{row['bare'] / roof:>11.2f}{row['grpc'] / row['bare']:>11.2f}"
        )
    print(f"read bandwidth {bandwidth / 1e9:.1f} GB/s, weights {weights / 1e6:.0f} MB")
    ratio = hits["missed"] / hits["hit"]
    print(f"first token behind {PREFILL}: {hits['missed']:.3f} s; asked again {hits['hit']:.3f} s, {ratio:.1f} times sooner")
    write_json(out, results | {"first_token_s": hits})


if __name__ == "__main__":
    main()

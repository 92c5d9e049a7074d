"""How much of decoding rounds take: a whole runtime round (decide, plan, move, commit) of every sequence of a batch, against the
steps between two rounds.

The step is a decoder of the model's shape with random weights: its matrix products and our paged attention on the very pools that
the rounds move; on a GPU it is replayed from a CUDA graph. The rest of a real step (sampling, the service) would make the share
smaller.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from runtime_service.compaction.policies.knorm import KNorm
from runtime_service.compaction.policies.sink_recent import SinkRecent
from runtime_service.compaction.policy import Policy
from runtime_service.compaction.round import Compactor
from runtime_service.core.params import CompactionParams, SamplingParams, StopParams
from runtime_service.core.request import GenerationRequest
from runtime_service.core.sequence import Sequence
from runtime_service.kv.allocator import PageAllocator
from runtime_service.kv.page_table import PageTable
from runtime_service.kv.pool import KVPool
from shared.ids import RequestId
from shared.kernels.attention.ops import load_ops
from shared.kernels.compaction.modes import Mode
from shared.kv_spec import DType, KVCacheSpec, LayerGroup, Layout


@dataclass(frozen=True)
class Decoder:
    """Shape of a model, the batch it decodes and the rounds of each sequence."""

    name: str
    layers: int
    hidden: int
    mlp: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: DType
    batch: int
    page_size: int
    budget: int
    interval: int

    @property
    def spec(self) -> KVCacheSpec:
        group = LayerGroup(tuple(range(self.layers)), self.kv_heads, self.head_dim, self.dtype)
        return KVCacheSpec((group,), Layout.PAGED, self.page_size, self.budget + self.interval)


POLICIES: dict[str, Policy] = {"knorm": KNorm(), "sink_recent": SinkRecent()}
"""Not the registry's mapping: it knows manifests, and the machine with the GPU has no pydantic."""

SMOLLM2 = Decoder("SmolLM2-135M", 30, 576, 1536, 49152, 9, 3, 64, DType.FLOAT32, 4, 16, 256, 64)
LLAMA_8B = Decoder("8B shape", 32, 4096, 14336, 128256, 32, 8, 128, DType.BFLOAT16, 32, 32, 2048, 128)


class Step:
    """One decode step of `decoder`: logits of `batch` tokens, written behind and attending over full sequences of `pool`."""

    def __init__(self, decoder: Decoder, pool: KVPool, table: Tensor) -> None:
        load_ops()
        self.decoder, self.pool, self.table = decoder, pool, table
        options = {"dtype": getattr(torch, decoder.dtype.value), "device": pool.device}
        self.start = torch.full((decoder.batch,), decoder.budget + decoder.interval - 1, dtype=torch.int32, device=pool.device)
        self.x = torch.randn(decoder.batch, decoder.hidden, **options)
        wide = decoder.heads * decoder.head_dim
        qkv = wide + 2 * decoder.kv_heads * decoder.head_dim
        shapes = {"qkv": (qkv, decoder.hidden), "o": (decoder.hidden, wide), "up": (2 * decoder.mlp, decoder.hidden)}
        shapes["down"] = (decoder.hidden, decoder.mlp)
        self.weights = [
            {name: torch.randn(shape, **options) / shape[1] ** 0.5 for name, shape in shapes.items()} for _ in range(decoder.layers)
        ]
        self.head = torch.randn(decoder.vocab, decoder.hidden, **options) / decoder.hidden**0.5

    def __call__(self) -> Tensor:
        d, x = self.decoder, self.x
        for layer, w in enumerate(self.weights):
            qkv = F.linear(F.rms_norm(x, (d.hidden,)), w["qkv"]).view(d.batch, -1, 1, d.head_dim)
            q, k, v = (part.contiguous() for part in qkv.split([d.heads, d.kv_heads, d.kv_heads], dim=1))
            options = (self.table, self.start, 0, d.head_dim**-0.5, None, None, None)
            out = torch.ops.quire.paged_attend(q, k, v, self.pool.tensors[layer], *options)
            x = x + F.linear(out.reshape(d.batch, -1), w["o"])
            gate, up = F.linear(F.rms_norm(x, (d.hidden,)), w["up"]).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, w["down"])
        return F.linear(F.rms_norm(x, (d.hidden,)), self.head)


class Cohort:
    """`batch` sequences that hold budget + interval entries each, as often as asked for."""

    def __init__(self, decoder: Decoder, pool: KVPool, policy: str, mode: Mode) -> None:
        self.decoder, self.pool = decoder, pool
        entries = decoder.budget + decoder.interval
        params = CompactionParams(policy, decoder.budget, decoder.interval, mode=mode)
        self.request = GenerationRequest(
            RequestId("bench"), "", (0,) * entries, SamplingParams(temperature=0.0), StopParams(max_tokens=9), params
        )
        self.allocator = PageAllocator(pool.num_pages)
        self.compactor = Compactor(pool, self.allocator, POLICIES, decoder.batch)
        self.compactor.prepare(self.request)

    def sequences(self) -> list[Sequence]:
        return [self._sequence(index) for index in range(self.decoder.batch)]

    def _sequence(self, index: int) -> Sequence:
        sequence = Sequence(self.request, index, index)
        sequence.start()
        sequence.hold(self.allocator.try_allocate(self.pool.spec.max_pages) or [])
        sequence.advance(len(self.request.prompt_ids))
        return sequence

    def round_seconds(self, repeats: int) -> float:
        """Median of whole rounds, as the serving thread and, behind it, the device see them."""
        times = []
        for _ in range(repeats):
            sequences = self.sequences()
            _wait(self.pool.device)
            start = time.perf_counter()
            self.compactor.run(sequences)
            _wait(self.pool.device)
            times.append(time.perf_counter() - start)
            for sequence in sequences:
                self.allocator.release(sequence.finish())
        return statistics.median(times[1:])


def decode_shares(decoder: Decoder, device: torch.device, repeats: int = 6) -> list[dict[str, Any]]:
    """Rows of the table: step, round, and the round's share of `interval` steps and itself."""
    pool = KVPool(decoder.spec, decoder.batch * decoder.spec.max_pages + 1, device)
    for tensor in pool.tensors:
        tensor.normal_()
    step_s: float | None = None
    rows = []
    for policy, mode in (("sink_recent", Mode.ORDERED), ("sink_recent", Mode.HOLE_FILLING), ("knorm", Mode.HOLE_FILLING)):
        cohort = Cohort(decoder, pool, policy, mode)
        if step_s is None:
            step_s = _step_seconds(decoder, pool, cohort, repeats)
        round_s = cohort.round_seconds(repeats)
        share = round_s / (decoder.interval * step_s + round_s)
        rows.append(
            {"decoder": decoder.name, "batch": decoder.batch, "budget": decoder.budget, "interval": decoder.interval}
            | {"policy": policy, "mode": mode, "step_s": step_s, "round_s": round_s, "share": share}
        )
        print(
            f"{decoder.name}, batch {decoder.batch}, budget {decoder.budget}, interval {decoder.interval}: "
            f"step {step_s * 1e3:.3f} ms, round ({policy}, {mode}) {round_s * 1e3:.3f} ms, {share:.2%} of decoding",
            flush=True,
        )
    return rows


def _step_seconds(decoder: Decoder, pool: KVPool, cohort: Cohort, repeats: int) -> float:
    sequences = cohort.sequences()
    rows = [PageTable(sequence.pages, decoder.page_size).row(decoder.spec.max_pages) for sequence in sequences]
    step: Callable[[], object] = Step(decoder, pool, torch.from_numpy(np.stack(rows)).to(pool.device))
    if pool.device.type == "cuda":
        step = _graphed(step)
    times = []
    for _ in range(repeats):
        _wait(pool.device)
        start = time.perf_counter()
        step()
        _wait(pool.device)
        times.append(time.perf_counter() - start)
    for sequence in sequences:
        cohort.allocator.release(sequence.finish())
    return statistics.median(times[1:])


def _graphed(step: Callable[[], object]) -> Callable[[], None]:
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

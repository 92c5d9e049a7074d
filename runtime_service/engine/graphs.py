"""Steps of an AOTInductor engine on a GPU. Nothing here waits for the device but the recording of a graph.

A CUDA graph keeps addresses and shapes, so decode steps are padded to a bucket and read their inputs from memory of that bucket:
one copy from pinned memory brings all of a step over. Padding rows are tokens 0 at ordinal 0 of the dump page. Steps of other
shapes run as they come.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime_service.engine.engine import EngineInputs
from runtime_service.engine.inductor import input_names
from runtime_service.engine.packing import InputLayout
from runtime_service.kv.pool import KVPool
from shared.bindings import BLOCK_TABLE, INPUT_IDS, LAST_INDEX, POSITION_IDS, WRITE_START
from shared.errors import MemoryExhausted
from shared.kernels.upload import upload
from shared.manifest import EngineManifest
from shared.profiles import Phase

_WARM_UPS = 2
"""Runs before a recording: kernels are loaded and workspaces allocated in the first, which no graph may contain."""

Run = Callable[[list[Tensor]], Tensor]
"""Inputs in the engine's order, pools last -> logits. All on the device."""


def batch_buckets(largest: int) -> tuple[int, ...]:
    """Batch sizes worth a graph of their own: 1, 2, 4, the multiples of 8 below `largest`, and `largest`."""
    sizes = {1, 2, 4, *range(8, largest, 8)}
    return (*sorted(size for size in sizes if size < largest), largest)


def decode_layout(batch: int, table_width: int) -> InputLayout:
    """The inputs of a decode step of `batch` rows, side by side."""
    rows = {INPUT_IDS: (batch, 1), POSITION_IDS: (batch, 1), WRITE_START: (batch,), LAST_INDEX: (batch,)}
    return InputLayout.of({**rows, BLOCK_TABLE: (batch, table_width)})


@dataclass(frozen=True, slots=True)
class _Recorded:
    layout: InputLayout
    buffer: Tensor
    graph: torch.cuda.CUDAGraph
    logits: Tensor


class GraphedSteps:
    """Decode steps replayed from graphs, one a bucket, recorded when first needed; graphs belong to the pool they were recorded on.

    Logits are on the device and overwritten by the next step of the same bucket.
    """

    def __init__(self, run: Run, manifest: EngineManifest) -> None:
        self._run = run
        self._device = torch.device("cuda")
        self._names = input_names(manifest)
        self._buckets = batch_buckets(manifest.profiles[Phase.DECODE].batch.max)
        self._table_width = manifest.cache.max_pages
        self._memory = torch.cuda.graph_pool_handle()
        self._recorded: dict[int, _Recorded] = {}
        self._pool: weakref.ref[KVPool] | None = None

    def run(self, inputs: EngineInputs, pool: KVPool) -> Tensor:
        """Logits of checked inputs. MemoryExhausted when the device has no room for what the step needs beside the pool."""
        if self._pool is None or self._pool() is not pool:
            self._recorded.clear()
            self._pool = weakref.ref(pool)  # a pool nobody serves from any more gives its memory back
        try:
            if inputs.profile == Phase.DECODE and inputs.query_len == 1:
                return self._replay(inputs, pool)
            return self._run([*(upload(getattr(inputs, name), self._device) for name in self._names), *pool.tensors])
        except torch.OutOfMemoryError as error:
            raise MemoryExhausted(
                f"a {inputs.profile} step of {inputs.batch} x {inputs.query_len} tokens needs more device memory than the KV pool "
                f"of {pool.num_bytes} bytes leaves: {error}. Load the engine with fewer pages"
            ) from error

    def close(self) -> None:
        """Wait for the device, then let go of the graphs."""
        torch.cuda.synchronize()
        self._recorded.clear()

    def _replay(self, inputs: EngineInputs, pool: KVPool) -> Tensor:
        bucket = next(size for size in self._buckets if size >= inputs.batch)
        recorded = self._recorded.get(bucket)
        if recorded is None:
            recorded = self._recorded[bucket] = self._record(bucket, pool)
        recorded.layout.bring({name: getattr(inputs, name) for name in recorded.layout.places}, recorded.buffer)
        recorded.graph.replay()
        return recorded.logits[: inputs.batch]

    def _record(self, bucket: int, pool: KVPool) -> _Recorded:
        layout = decode_layout(bucket, self._table_width)
        buffer = torch.zeros(layout.size, dtype=torch.int32, device=self._device)
        arguments = [*(layout.view(buffer, name) for name in self._names), *pool.tensors]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it so
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self._run(arguments)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may load another engine meanwhile: only this one's calls must be fit for a graph.
        with torch.cuda.graph(graph, pool=self._memory, stream=stream, capture_error_mode="thread_local"):
            logits = self._run(arguments)
        return _Recorded(layout, buffer, graph, logits)

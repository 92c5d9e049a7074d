"""Steps of an AOTInductor engine on a GPU. Nothing here waits for the device but the recording of a graph.

A CUDA graph keeps addresses and shapes, so decode steps are padded to a bucket and read their inputs from memory of that bucket:
one copy from pinned memory brings all of a step over. Padding rows are tokens 0 at ordinal 0 of the dump page. Steps of other
shapes run as they come.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runtime_service.engine.engine import EngineInputs
from runtime_service.engine.inductor import input_names
from runtime_service.kv.pool import KVPool
from shared.bindings import BLOCK_TABLE, INPUT_IDS, LAST_INDEX, POSITION_IDS, WRITE_START
from shared.errors import MemoryExhausted
from shared.manifest import EngineManifest
from shared.profiles import Phase

_ALIGNMENT = 64
"""Elements between the starts of two inputs: Inductor's kernels may read them in vectors of 16 bytes."""
_WARM_UPS = 2
"""Runs before a recording: kernels are loaded and workspaces allocated in the first, which no graph may contain."""

Run = Callable[[list[Tensor]], Tensor]
"""Inputs in the engine's order, pools last -> logits. All on the device."""


def batch_buckets(largest: int) -> tuple[int, ...]:
    """Batch sizes worth a graph of their own: 1, 2, 4, the multiples of 8 below `largest`, and `largest`."""
    sizes = {1, 2, 4, *range(8, largest, 8)}
    return (*sorted(size for size in sizes if size < largest), largest)


@dataclass(frozen=True, slots=True)
class InputLayout:
    """Where the inputs of a decode step of `batch` rows lie in one int32 buffer: (offset, shape) by name."""

    places: dict[str, tuple[int, tuple[int, ...]]]
    size: int

    @classmethod
    def of(cls, batch: int, table_width: int) -> InputLayout:
        shapes = {
            INPUT_IDS: (batch, 1),
            POSITION_IDS: (batch, 1),
            WRITE_START: (batch,),
            LAST_INDEX: (batch,),
            BLOCK_TABLE: (batch, table_width),
        }
        places, offset = {}, 0
        for name, shape in shapes.items():
            places[name] = (offset, shape)
            offset += -(-int(np.prod(shape)) // _ALIGNMENT) * _ALIGNMENT
        return cls(places, offset)

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        return {name: buffer[at : at + int(np.prod(shape))].view(shape) for name, (at, shape) in self.places.items()}

    def packed(self, inputs: EngineInputs) -> Tensor:
        """The step on the host, padded with zeros; ids that are on the device already are left zero."""
        buffer = torch.zeros(self.size, dtype=torch.int32)
        for name, view in self.views(buffer).items():
            value: Tensor = getattr(inputs, name)
            if value.device.type == "cpu":
                view[tuple(slice(size) for size in value.shape)] = value
        return buffer


@dataclass(frozen=True, slots=True)
class _Recorded:
    layout: InputLayout
    buffer: Tensor
    views: dict[str, Tensor]
    graph: torch.cuda.CUDAGraph
    logits: Tensor


class GraphedSteps:
    """Decode steps replayed from graphs, one a bucket, recorded when first needed; graphs belong to the pool they were recorded on.

    Logits are on the device and overwritten by the next step of the same bucket.
    """

    def __init__(self, run: Run, manifest: EngineManifest, device: str = "cuda") -> None:
        self._run = run
        self._device = device
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
            return self._run([*(self._on_device(getattr(inputs, name)) for name in self._names), *pool.tensors])
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
        recorded.buffer.copy_(recorded.layout.packed(inputs).pin_memory(), non_blocking=True)
        if inputs.input_ids.device.type != "cpu":
            recorded.views[INPUT_IDS][: inputs.batch].copy_(inputs.input_ids)
        recorded.graph.replay()
        return recorded.logits[: inputs.batch]

    def _record(self, bucket: int, pool: KVPool) -> _Recorded:
        layout = InputLayout.of(bucket, self._table_width)
        buffer = torch.zeros(layout.size, dtype=torch.int32, device=self._device)
        views = layout.views(buffer)
        arguments = [*(views[name] for name in self._names), *pool.tensors]
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
        return _Recorded(layout, buffer, views, graph, logits)

    def _on_device(self, value: Tensor) -> Tensor:
        return value.pin_memory().to(self._device, non_blocking=True) if value.device.type == "cpu" else value

"""TensorRT and a GPU for the Launcher, in host memory: contexts that read and write the addresses they are given.

`TinyPlan` stands for an ICudaEngine. What it computes is a tiny decoder's step; where that comes from and goes to is the Launcher's
doing alone, so a wrong address, shape or order gives wrong tokens. A graph replays launches with what was bound at its recording.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from runtime_service.engine.engine import EngineInputs
from runtime_service.kv.pool import KVPool
from shared.bindings import (
    BLOCK_TABLE,
    INPUT_IDS,
    LAST_INDEX,
    LOGITS,
    POSITION_IDS,
    WRITE_START,
    cache_name,
    pool_name,
    updated_name,
)
from shared.kv_spec import Layout
from tests.support.tiny_engine import TinyEngine

TRT = SimpleNamespace(
    ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED="ours"),
    DynamicShapesKernelSpecializationStrategy=SimpleNamespace(EAGER="eager"),
)


class FakeTorch:
    """The parts of torch that launch.py uses, with the host in the place of a GPU. `waits` counts waits for the device."""

    int32, uint8, float32 = torch.int32, torch.uint8, torch.float32

    def __init__(self) -> None:
        self.waits = 0
        self.recording: list[Callable[[], None]] | None = None
        stream = SimpleNamespace(cuda_stream=7, wait_stream=lambda other: None, synchronize=self._wait)
        self.cuda = SimpleNamespace(
            Stream=lambda: stream,
            current_stream=lambda: stream,
            stream=self._entered,
            CUDAGraph=lambda: SimpleNamespace(replay=None),
            graph=self._record,
        )

    def empty(self, *size: Any, dtype: torch.dtype, device: str) -> Tensor:
        assert device == "cuda"
        return torch.zeros(*size, dtype=dtype)

    def _wait(self) -> None:
        assert self.recording is None, "a wait may not be recorded"
        self.waits += 1

    @contextmanager
    def _entered(self, stream: Any) -> Iterator[None]:
        yield

    @contextmanager
    def _record(self, graph: Any, *, stream: Any, capture_error_mode: str) -> Iterator[None]:
        recorded = self.recording = []
        yield
        self.recording = None
        graph.replay = lambda: [launch() for launch in recorded]


class TinyPlan:
    """An ICudaEngine whose network is `engine`."""

    device_memory_size_v2 = 64

    def __init__(self, engine: TinyEngine, gpu: FakeTorch) -> None:
        self.engine, self.gpu = engine, gpu
        self.contexts: list[tuple[str, object]] = []
        """How kernels are compiled for each context made, and where they are kept."""

    def create_runtime_config(self) -> Any:
        config = SimpleNamespace(dynamic_shapes_kernel_specialization_strategy="lazy", create_runtime_cache=object)
        config.set_execution_context_allocation_strategy = lambda strategy: None
        config.set_runtime_cache = lambda kernels: setattr(config, "kernels", kernels)
        return config

    def create_execution_context(self, config: Any) -> TinyContext:
        self.contexts.append((config.dynamic_shapes_kernel_specialization_strategy, config.kernels))
        return TinyContext(self)

    def get_tensor_profile_shape(self, name: str, index: int) -> Any:
        return ((4,), (60,), (400,))


class TinyContext:
    """An IExecutionContext."""

    def __init__(self, plan: TinyPlan) -> None:
        self._plan = plan
        self._profile = -1
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}

    def set_device_memory(self, address: int, size: int) -> None: ...

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self._profile = index
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self._shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert name != INPUT_IDS or address % 16 == 0
        self._addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        shapes, addresses = dict(self._shapes), dict(self._addresses)
        if self._plan.gpu.recording is None:
            self._step(shapes, addresses)
        else:
            self._plan.gpu.recording.append(lambda: self._step(shapes, addresses))
        return True

    def _step(self, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int]) -> None:
        manifest = self._plan.engine.manifest
        spec, profile = manifest.cache, manifest.profiles.profiles[self._profile]

        def at(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            size = math.prod(shape) * dtype.itemsize
            return torch.frombuffer((ctypes.c_char * size).from_address(addresses[name]), dtype=dtype).view(shape)

        ids, positions, starts, last = (
            at(name, shapes[name], torch.int32) for name in (INPUT_IDS, POSITION_IDS, WRITE_START, LAST_INDEX)
        )
        names = [pool_name(layer) for layer in range(spec.num_layers)]
        if is_linear := spec.layout is Layout.LINEAR:
            names = [cache_name(layer, kind) for layer in range(spec.num_layers) for kind in "kv"]
        caches = [at(name, shapes[name], torch.float32) for name in names]
        if is_linear:
            table = torch.arange(len(ids), dtype=torch.int32)[:, None]
            pools = [torch.stack(pair) for pair in zip(caches[::2], caches[1::2], strict=True)]
            updated = [half for pool in pools for half in pool]
        else:
            table = at(BLOCK_TABLE, shapes[BLOCK_TABLE], torch.int32)
            pools = [cache.clone().unflatten(0, (-1, 2)) for cache in caches]
            updated = [pool.flatten(0, 1) for pool in pools]
        inputs = EngineInputs(profile.name, *(value.clone() for value in (ids, positions, starts, last, table)))
        logits = self._plan.engine.run(inputs, KVPool.over(spec, pools))
        at(LOGITS, tuple(logits.shape), torch.float32).copy_(logits)
        for name, values in zip(names, updated, strict=True):
            at(updated_name(name), tuple(values.shape), torch.float32).copy_(values)

"""Launches of a plan: bindings in device memory that keep their addresses, decode steps replayed from CUDA graphs.

A captured graph keeps addresses and shapes, and TensorRT forbids to change its execution context afterwards. So every graph has a
context of its own; all contexts work in one scratch memory, because launches follow one another on one stream. Nothing waits for
the device but what happens once: the first launch on a pool, and the recording of a graph.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from runtime_service.engine.packing import InputLayout
from runtime_service.engine.tensorrt.api import ExecutionContext, Plan, RuntimeConfig
from runtime_service.kv.pool import K, KVPool, V
from shared.bindings import (
    BLOCK_TABLE,
    INPUT_IDS,
    LAST_INDEX,
    LOGITS,
    PACKED_ENDS,
    PACKED_OFFSETS,
    PACKED_ORDER,
    POSITION_IDS,
    WRITE_START,
    BindingSpec,
    Role,
    cache_name,
    pool_name,
    updated_name,
)
from shared.errors import EngineIncompatible, InternalError
from shared.kv_spec import Layout
from shared.manifest import EngineManifest

MAX_GRAPHS = 32
"""Graphs kept at a time, the most recently used: one for each number of rows and first slot."""
_ALIGNMENT = 256
"""Bytes; TensorRT's kernels assume it of every binding."""
_TOKENS = (INPUT_IDS, POSITION_IDS)
_PER_ROW = (WRITE_START, LAST_INDEX)


@dataclass(frozen=True, slots=True)
class Launch:
    """What decides addresses and shapes: `rows` rows of `query_len` tokens under profile `profile`, in the linear layout from
    `first_slot` on, in the paged one with `num_packed` rows to write."""

    profile: int
    rows: int
    query_len: int
    first_slot: int = 0
    num_packed: int = 0


@dataclass(slots=True)
class _Captured:
    context: ExecutionContext
    graph: torch.cuda.CUDAGraph


@dataclass(frozen=True, slots=True)
class _Configs:
    """How contexts are made. Their scratch memory is ours; those of the RTX flavour share the `kernels` it compiles for each new
    shape, half a second a context otherwise, at which TensorRT points without holding them. It runs general kernels until those
    for the shape are compiled behind; a graph would keep the general ones, so what is `recorded` waits for its own."""

    launched: RuntimeConfig
    recorded: RuntimeConfig
    kernels: object


def input_layout(launch: Launch, manifest: EngineManifest, num_pages: int) -> InputLayout:
    """Where the inputs of `launch`, on a pool of `num_pages`, lie side by side."""
    names = [name for name in _TOKENS if name != POSITION_IDS or manifest.takes_positions]
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(names, (launch.rows, launch.query_len))
    shapes |= dict.fromkeys(_PER_ROW, (launch.rows,))
    if manifest.cache.layout is Layout.PAGED:
        shapes |= {BLOCK_TABLE: (launch.rows, manifest.cache.max_pages), PACKED_ORDER: (launch.num_packed,)}
        shapes |= {PACKED_ENDS: (2 * num_pages + 1,), PACKED_OFFSETS: (2 * num_pages,)}
    return InputLayout.of(shapes)


class Launcher:
    """Runs `plan` (ICudaEngine) over the pool it is given. `weights` are device tensors by binding name; they are kept.

    EngineIncompatible when a weight or a cache row is not what the plan reads.
    """

    def __init__(self, trt: ModuleType, plan: Plan, manifest: EngineManifest, weights: Mapping[str, Tensor]) -> None:
        self._plan, self._manifest, self._weights = plan, manifest, weights
        self._is_paged = manifest.cache.layout is Layout.PAGED
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it so
        rows = manifest.profiles.max_batch
        self._inputs = torch.empty(0, dtype=torch.int32, device="cuda")
        self._scratch = torch.empty(max(1, plan.device_memory_size_v2), dtype=torch.uint8, device="cuda")
        self._copies = {b.name: _rows_like(b, rows) for b in manifest.bindings if b.role is Role.OUTPUT}
        self._logits = self._copies.pop(LOGITS)
        self._configs = _make_configs(trt, plan)
        self._contexts: dict[int, ExecutionContext] = {}
        self._graphs: OrderedDict[Launch, _Captured] = OrderedDict()
        self._pool: KVPool | None = None
        self._check_weights()
        if not self._is_paged:
            self._check_rows()

    def run(self, launch: Launch, tokens: Mapping[str, Tensor], pool: KVPool, *, capture: bool) -> Tensor:
        """Logits `[rows, vocab]` on the device, overwritten by the next run; the current stream may use them, and `pool`, at once.
        `tokens` are the int32 inputs, each on the host or, written by the current stream, on the device.

        With `capture` the launch is recorded when first seen and replayed from then on. EngineIncompatible for a pool with more
        pages than the plan takes.
        """
        if pool is not self._pool:
            self._take(pool)
        layout = input_layout(launch, self._manifest, pool.num_pages)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            layout.bring(tokens, self._inputs)
            if capture:
                self._captured(launch, layout, pool).graph.replay()
            else:
                context = self._contexts.get(launch.profile)
                if context is None:
                    context = self._contexts[launch.profile] = self._context(launch.profile, self._configs.launched)
                self._bind(context, launch, layout, pool)
                self._execute(context, launch, pool)
        torch.cuda.current_stream().wait_stream(self._stream)
        return self._logits[: launch.rows]

    def close(self) -> None:
        """Wait for the device, then let go of contexts, graphs and the pool. The next run makes them anew."""
        self._stream.synchronize()
        self._graphs.clear()
        self._contexts.clear()
        self._pool = None

    def _take(self, pool: KVPool) -> None:
        self._stream.synchronize()  # a step on the last pool may still read what is let go of here
        self._graphs.clear()
        if self._is_paged:
            most = self._plan.get_tensor_profile_shape(pool_name(0), 0)[2][0] // 2
            if pool.num_pages > most:
                raise EngineIncompatible(
                    f"the pool has {pool.num_pages} pages, the plan takes at most {most}; use fewer pages, or larger ones",
                    details={"field": "num_pages", "expected": f"at most {most}", "got": str(pool.num_pages)},
                )
        largest = [
            Launch(index, p.batch.max, p.query_len.max, num_packed=2 * p.batch.max * p.query_len.max)
            for index, p in enumerate(self._manifest.profiles.profiles)
        ]
        size = max(input_layout(launch, self._manifest, pool.num_pages).size for launch in largest)
        if size > len(self._inputs):
            self._inputs = torch.empty(size, dtype=torch.int32, device="cuda")
        self._pool = pool

    def _captured(self, launch: Launch, layout: InputLayout, pool: KVPool) -> _Captured:
        """Recording a launch runs it once before: kernels are compiled on their first use, which no graph may contain. The
        step is idempotent, since it writes the same rows again."""
        captured = self._graphs.get(launch)
        if captured is None:
            context = self._context(launch.profile, self._configs.recorded)
            self._bind(context, launch, layout, pool)
            self._execute(context, launch, pool)
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # Other threads may load another engine meanwhile: only this one's calls must be fit for a graph.
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                self._execute(context, launch, pool)
            captured = self._graphs[launch] = _Captured(context, graph)
            if len(self._graphs) > MAX_GRAPHS:  # no launch is under way since the wait above
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(launch)
        return captured

    def _context(self, profile: int, config: RuntimeConfig) -> ExecutionContext:
        context = self._plan.create_execution_context(config)
        if context is None:
            raise InternalError("TensorRT made no execution context; its errors are in the log")
        context.set_device_memory(self._scratch.data_ptr(), self._scratch.numel())
        self._done(context.set_optimization_profile_async(profile, self._stream.cuda_stream), f"profile {profile}")
        for name, weight in self._weights.items():
            context.set_tensor_address(name, weight.data_ptr())
        context.set_tensor_address(LOGITS, self._logits.data_ptr())
        return context

    def _bind(self, context: ExecutionContext, launch: Launch, layout: InputLayout, pool: KVPool) -> None:
        for name, (_, shape) in layout.places.items():
            self._done(context.set_input_shape(name, shape), name)
            context.set_tensor_address(name, layout.view(self._inputs, name).data_ptr())
        if self._is_paged:
            for layer, tensor in enumerate(pool.tensors):
                self._bind_cache(context, pool_name(layer), tensor.flatten(0, 1))
        else:
            for name, rows in self._slots(launch, pool):
                self._bind_cache(context, name, rows)

    @staticmethod
    def _slots(launch: Launch, pool: KVPool) -> Iterator[tuple[str, Tensor]]:
        """Every linear cache and its rows in the pool."""
        for layer, tensor in enumerate(pool.tensors):
            for kind, half in (("k", K), ("v", V)):
                yield cache_name(layer, kind), tensor[half, launch.first_slot : launch.first_slot + launch.rows]

    def _bind_cache(self, context: ExecutionContext, name: str, rows: Tensor) -> None:
        """Input and output at one address, or the output in a copy."""
        self._done(context.set_input_shape(name, tuple(rows.shape)), name)
        self._done(context.set_tensor_address(name, rows.data_ptr()), name)
        output = updated_name(name)
        written = self._copies.get(output, rows)
        self._done(context.set_tensor_address(output, written.data_ptr()), output)

    def _execute(self, context: ExecutionContext, launch: Launch, pool: KVPool) -> None:
        self._done(context.execute_async_v3(self._stream.cuda_stream), "the launch")
        if self._copies:
            for name, rows in self._slots(launch, pool):
                if (copy := self._copies.get(updated_name(name))) is not None:
                    rows.copy_(copy[: launch.rows])

    @staticmethod
    def _done(accepted: bool, what: str) -> None:
        if not accepted:
            raise InternalError(f"TensorRT refused {what}; its errors are in the log")

    def _check_weights(self) -> None:
        for binding in self._manifest.bindings:
            if binding.role is Role.WEIGHT:
                weight = self._weights[binding.name]
                expected = (binding.shape, f"torch.{binding.dtype}", True)
                got = (tuple(weight.shape), str(weight.dtype), weight.is_contiguous() and weight.data_ptr() % _ALIGNMENT == 0)
                if expected != got:
                    raise EngineIncompatible(
                        f"weight {binding.name} must have (shape, dtype, aligned) {expected}; the model has {got}",
                        details={"field": f"constants.{binding.name}", "expected": str(expected), "got": str(got)},
                    )

    def _check_rows(self) -> None:
        spec = self._manifest.cache
        for layer, group in spec.iter_layers():
            if (row := group.kv_heads * spec.max_len * group.row_bytes) % _ALIGNMENT:
                raise EngineIncompatible(
                    f"a slot of layer {layer} takes {row} bytes; slots must start at multiples of {_ALIGNMENT}: "
                    "compile with another max_len",
                    details={"field": "cache.max_len", "expected": f"a multiple of {_ALIGNMENT} bytes a slot", "got": str(row)},
                )


def _make_configs(trt: ModuleType, plan: Plan) -> _Configs:
    kernels = None
    configs = [plan.create_runtime_config() for _ in range(2)]
    for config in configs:
        config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if hasattr(config, "create_runtime_cache"):
            kernels = kernels or config.create_runtime_cache()
            config.set_runtime_cache(kernels)
    launched, recorded = configs
    if kernels is not None:
        recorded.dynamic_shapes_kernel_specialization_strategy = trt.DynamicShapesKernelSpecializationStrategy.EAGER
    return _Configs(launched, recorded, kernels)


def _rows_like(binding: BindingSpec, rows: int) -> Tensor:
    """Memory for `rows` rows of an output: the logits, or the copy of a cache."""
    return torch.empty((rows, *binding.shape[1:]), dtype=getattr(torch, binding.dtype), device="cuda")  # type: ignore[arg-type]  # only the first axis of an output is a profile's

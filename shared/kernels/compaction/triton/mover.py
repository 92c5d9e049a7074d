"""Binds pack and move launches for each group. Under TRITON_INTERPRET=1 the same kernels run on the CPU, slowly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl

from shared.kernels.compaction.binding import BoundGroup
from shared.kernels.compaction.inputs import RoundInputs
from shared.kernels.compaction.modes import Mode
from shared.kernels.compaction.triton.move import split_kernel, walk_kernel
from shared.kernels.compaction.triton.pack import pack_kernel

_UNITS = {4: tl.int32, 2: tl.int16, 1: tl.int8}


@dataclass(frozen=True, slots=True)
class Tuning:
    """How work is cut. `tile_vectors`: of at most 16 bytes of K, and as many of V, in a tile; a power of two. `warps`: of a move
    program. `fill`: programs a multiprocessor should get before lists are no longer shared out further."""

    tile_vectors: int = 512
    warps: int = 4
    fill: int = 8


@dataclass(frozen=True, slots=True, eq=False)
class _Launch:
    """A kernel with every argument but the round's bound."""

    kernel: Any
    tensors: tuple[torch.Tensor, ...]
    constants: dict[str, Any]

    def __call__(self, grid: tuple[int, ...], **scalars: int) -> None:
        self.kernel[grid](*self.tensors, **scalars, **self.constants)

    def compile(self, **scalars: int) -> None:
        """Compile for these arguments without launching. The interpreter has nothing to compile."""
        if isinstance(self.kernel, triton.JITFunction):
            self.kernel.warmup(*self.tensors, **scalars, **self.constants, grid=(1,))


@dataclass(frozen=True, slots=True, eq=False)
class GroupLaunch:
    """Launches of one group, bound. A round with at least `walk_from` requests has lists enough to fill the chip."""

    pack: _Launch
    pack_rows: int
    walk: _Launch
    split: _Launch | None
    lists: int
    tiles: int
    walk_from: int
    target_programs: int

    def __call__(self, request_count: int) -> None:
        """Pack, then move, on the current stream."""
        lists = self.lists * request_count
        self.pack(grid=(request_count, self.pack_rows))
        if self.split is not None and request_count < self.walk_from:
            self.split(grid=(lists * self.tiles,), requests=request_count)
            return
        programs = 1
        if self.split is None:
            programs = min(self.tiles, max(1, -(-self.target_programs // lists)))
        self.walk(grid=(lists * programs,), requests=request_count, programs=programs)

    def compile(self) -> None:
        self.pack.compile()
        self.walk.compile(requests=1, programs=1)
        if self.split is not None:
            self.split.compile(requests=1)


def bind(
    groups: tuple[BoundGroup, ...], inputs: RoundInputs, fault_key: torch.Tensor | None, tuning: Tuning | None = None
) -> Callable[[int], None]:
    """See `movers.bind`. Allocates the index buffers and compiles, so that a round does neither."""
    launches = tuple(bind_group(group, inputs, fault_key, tuning or Tuning()) for group in groups)
    return partial(_run, launches)


def _run(launches: tuple[GroupLaunch, ...], request_count: int) -> None:
    for launch in launches:
        launch(request_count)


def bind_group(group: BoundGroup, inputs: RoundInputs, fault_key: torch.Tensor | None, tuning: Tuning) -> GroupLaunch:
    """Allocate and compile what rounds of one group use."""
    device, batch, layers = inputs.kept.device, inputs.batch, len(group.pools)
    geometry, holes = group.geometry, group.mode is Mode.HOLE_FILLING
    strides = (geometry.page_stride, geometry.kv_stride, geometry.head_stride, geometry.token_stride)
    alignment = gcd(16, *strides, *(pool.data_ptr() for pool in group.pools))
    vector = gcd(alignment, geometry.row_bytes)
    unit = gcd(4, vector)
    row_vectors = geometry.row_bytes // vector
    block = max(tuning.tile_vectors, triton.next_power_of_2(row_vectors))
    tile_rows = block // row_vectors
    tiles = triton.cdiv(group.move_capacity, tile_rows)
    lists = layers * geometry.kv_heads

    def indices(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    src_cells, dst_cells = (
        indices(group.list_rows, batch, group.move_capacity),
        indices(group.list_rows, batch, group.move_capacity),
    )
    spans, waits, epoch = indices(group.list_rows, batch, 3), indices(group.list_rows, batch, 0 if holes else tiles, 2), indices(1)
    lengths = (inputs.move_offsets, inputs.tail, group.tail, inputs.base, inputs.valid_len)
    first_rows = torch.tensor(group.first_row, dtype=torch.int32, device=device)
    fault = fault_key if fault_key is not None else epoch  # an address that is never read
    shared = {"batch": batch, "capacity": group.move_capacity, "layer_step": group.list_layer_step}
    pack = _Launch(
        pack_kernel,
        (inputs.kept, *lengths, group.block_table, first_rows, fault, src_cells, dst_cells, spans, waits, epoch),
        shared
        | {
            "decision_rows": inputs.kept.shape[1],
            "keep_capacity": inputs.keep_capacity,
            "tail_capacity": inputs.tail_capacity,
            "table_stride": group.block_table.stride(0),
            "max_pages": group.block_table.shape[1],
            "num_pages": geometry.num_pages,
            "page_size": geometry.page_size,
            "window": group.window or 0,
            "tiles": tiles,
            "tile_rows": tile_rows,
            "steps": inputs.keep_capacity.bit_length(),
            "MASKED": group.window is not None,
            "HOLE_FILLING": holes,
            "SCRUB": group.scrub,
            "CHECKED": fault_key is not None,
            "BLOCK": 1024,
            "num_warps": 4,
        },
    )
    move = shared | {
        "heads": geometry.kv_heads,
        "head_step": group.head_step,
        "UNIT": _UNITS[unit],
        "ALIGNMENT": alignment,
        "HEAD_STRIDE": geometry.head_stride // unit,
        "PAGE_SIZE": geometry.page_size,
        "ROW_VECTORS": row_vectors,
        "WIDTH": vector // unit,
        "BLOCK": block,
        "PAGE_STRIDE": geometry.page_stride // unit,
        "KV_STRIDE": geometry.kv_stride // unit,
        "TOKEN_STRIDE": geometry.token_stride // unit,
        "num_warps": tuning.warps,
        "num_stages": 1,
    }
    pointers = torch.tensor([pool.data_ptr() for pool in group.pools], dtype=torch.int64, device=device)
    lists_args = (pointers, src_cells, dst_cells, spans)
    walk = _Launch(walk_kernel, lists_args, move | {"FREE": holes})
    split = None
    if not holes:
        loaded = indices(lists * batch, tiles)
        split = _Launch(split_kernel, (*lists_args, waits, loaded, epoch), move | {"layers": layers, "tiles": tiles})
    target = _multiprocessors(device) * tuning.fill
    launch = GroupLaunch(pack, group.list_rows, walk, split, lists, tiles, triton.cdiv(target, lists), target)
    launch.compile()
    return launch


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1

"""Other designs of the ordered move beside the one that is used, on one GPU in one run.

python3 -m tests.bench.compaction_designs --json FILE      share of the copy of each; each checked against the first
ncu ... python3 -m tests.bench.compaction_designs --profile    one round of 8 layers, for the profiler

walk      what is used: one program a list, K and V of a tile in registers, the next tile's loads in flight
split     one program a tile, which waits for the tiles whose sources it clobbers
kv apart  walk, with K and V in programs of their own: twice the programs, half the registers
bulk      one warp a list, rows through shared memory by the bulk copy engine (`compaction_bulk.cu`)
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from shared.kernels.compaction.geometry import byte_view, geometry_of
from shared.kernels.compaction.triton.move import _keys_of, _rows
from shared.kernels.compaction.triton.mover import GroupLaunch, Tuning, bind_group
from tests.bench.compaction import BASE, EIGHT, ONE, Bench, Shape, gpu_seconds, graphed
from tests.bench.machine import copy_bandwidth, write_json

SHAPES = [BASE, replace(BASE, name="budget 2048 evicting 128", valid_len=2176), ONE]


@triton.jit
def apart_kernel(
    pool_pointers,
    src_cells,
    dst_cells,
    spans,
    requests,
    heads,
    capacity,
    UNIT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ROW_VECTORS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_STRIDE: tl.constexpr,
    KV_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
):
    """Grid: lists * 2, K or V fastest."""
    TILE_ROWS: tl.constexpr = BLOCK // ROW_VECTORS
    plane = tl.program_id(0) % 2
    head = tl.program_id(0) // 2 % heads
    request = tl.program_id(0) // 2 // heads % requests
    layer = tl.program_id(0) // 2 // heads // requests
    rows = _keys_of(pool_pointers, layer, head, UNIT, HEAD_STRIDE, ALIGNMENT) + plane * KV_STRIDE
    src_list = src_cells + request.to(tl.int64) * capacity
    dst_list = dst_cells + request.to(tl.int64) * capacity
    begin = tl.load(spans + request * 3)
    end = tl.load(spans + request * 3 + 1)
    lane = tl.arange(0, BLOCK) // ROW_VECTORS
    src = tl.load(src_list + begin + lane, mask=begin + lane < end, other=-1)
    dst = tl.load(dst_list + begin + lane, mask=begin + lane < end, other=-1)
    value = tl.load(
        _rows(rows, src, PAGE_SIZE, ROW_VECTORS, WIDTH, BLOCK, PAGE_STRIDE, TOKEN_STRIDE), mask=(src >= 0)[:, None], other=0
    )
    for move in range(begin + TILE_ROWS, end + TILE_ROWS, TILE_ROWS):
        live = move + lane < end
        next_src = tl.load(src_list + move + lane, mask=live, other=-1)
        next_dst = tl.load(dst_list + move + lane, mask=live, other=-1)
        source = _rows(rows, next_src, PAGE_SIZE, ROW_VECTORS, WIDTH, BLOCK, PAGE_STRIDE, TOKEN_STRIDE)
        next_value = tl.load(source, mask=(next_src >= 0)[:, None], other=0)
        tl.debug_barrier()
        target = _rows(rows, dst, PAGE_SIZE, ROW_VECTORS, WIDTH, BLOCK, PAGE_STRIDE, TOKEN_STRIDE)
        tl.store(target, value, mask=(dst >= 0)[:, None])
        dst, value = next_dst, next_value


def kv_apart(bench: Bench, launch: GroupLaunch, warps: int) -> Callable[[], None]:
    """Pack as usual, then K and V by programs of their own."""
    pointers, src, dst, spans = launch.walk.tensors
    dropped = {"batch", "layer_step", "head_step", "FREE", "num_warps"}
    constants = {name: value for name, value in launch.walk.constants.items() if name not in dropped}
    grid = (launch.lists * bench.count * 2,)

    def round_() -> None:
        launch.pack(grid=(bench.count, launch.pack_rows))
        apart_kernel[grid](pointers, src, dst, spans, requests=bench.count, num_warps=warps, **constants)

    return round_


def bulk(bench: Bench, launch: GroupLaunch, library: ctypes.CDLL) -> Callable[[], None]:
    """Pack as usual, then the warps of `compaction_bulk.cu`."""
    pointers, src, dst, spans = launch.walk.tensors
    geometry = geometry_of(byte_view(bench.pools[0], bench.layout.layout))
    strides = (geometry.page_stride, geometry.kv_stride, geometry.head_stride, geometry.token_stride)

    def round_() -> None:
        launch.pack(grid=(bench.count, launch.pack_rows))
        error = library.bulk_walk(
            *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (pointers, src, dst, spans)),
            len(bench.pools),
            bench.count,
            geometry.kv_heads,
            launch.walk.constants["capacity"],
            geometry.page_size,
            geometry.row_bytes,
            *map(ctypes.c_int64, strides),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )
        assert error == 0, error

    return round_


def compile_bulk() -> ctypes.CDLL:
    source = Path(__file__).with_name("compaction_bulk.cu")
    library = Path(tempfile.mkdtemp()) / "bulk.so"
    command = ["nvcc", "-arch=sm_90", "-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


def designs(bench: Bench, library: ctypes.CDLL) -> dict[str, Callable[[], None]]:
    """A round of each, bound."""

    def bound(**tuning: int) -> GroupLaunch:
        return bind_group(bench.params().groups[0], bench.inputs, None, Tuning(**tuning))

    walking = bound(fill=0)
    rounds: dict[str, Callable[[], None]] = {"walk": partial(walking, bench.count)}
    for tile, warps in ((256, 4), (1024, 8)):
        rounds[f"walk, {tile} vectors, {warps} warps"] = partial(bound(fill=0, tile_vectors=tile, warps=warps), bench.count)
    rounds["split"] = partial(bound(fill=1 << 20), bench.count)
    for warps in (2, 4):
        rounds[f"kv apart, {warps} warps"] = kv_apart(bench, walking, warps)
    rounds["bulk"] = bulk(bench, walking, library)
    return rounds


def unlike_walk(library: ctypes.CDLL) -> list[str]:
    """Designs that leave other bytes than walk does, on a pool of which every row is different."""
    shape = Shape("check", layers=2, batch=3, valid_len=700, keep=333)
    expected: list[torch.Tensor] = []
    wrong = []
    for name in designs(Bench(shape, torch.device("cuda", 0)), library):
        bench = _distinct(Bench(shape, torch.device("cuda", 0)))
        designs(bench, library)[name]()
        torch.cuda.synchronize()
        expected = expected or bench.pools
        if not all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(bench.pools, expected, strict=True)):
            wrong.append(name)
    return wrong


def _distinct(bench: Bench) -> Bench:
    for layer, pool in enumerate(bench.pools):
        words = pool.view(torch.int64).flatten()
        words.copy_(torch.arange(len(words), device=words.device) * 7919 + layer)
    return bench


def compare(library: ctypes.CDLL) -> dict[str, Any]:
    device = torch.device("cuda", 0)
    copy = copy_bandwidth(device)
    wrong = unlike_walk(library)
    results: dict[str, Any] = {"copy_bytes_per_s": copy, "wrong": wrong, "shapes": {}}
    print(f"device copy {copy / 1e9:.0f} GB/s; designs that move other bytes than walk: {wrong or 'none'}")
    for shape in SHAPES:
        bench = Bench(shape, device)
        repeats = 1 if bench.moved_bytes > 1 << 30 else 16
        row = {}
        for name, call in designs(bench, library).items():
            row[name] = bench.moved_bytes / (gpu_seconds(graphed(call, repeats), repeats=3) / repeats) / copy
            print(f"{shape.name:42} {name:32} {row[name]:6.1%} of copy", flush=True)
        results["shapes"][shape.name] = row
        del bench
        torch.cuda.empty_cache()
    return results


def profile() -> None:
    """One round of the design that is used, after one to warm up."""
    call = Bench(EIGHT, torch.device("cuda", 0)).round()
    for _ in range(2):
        call()
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    if arguments.profile:
        profile()
        return
    results = compare(compile_bulk())
    if arguments.json is not None:
        write_json(arguments.json, results)


if __name__ == "__main__":
    main()

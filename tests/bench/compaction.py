"""Compaction beside the machine's copy bandwidth and torch's gather and scatter, all in one run.

    python3 -m tests.bench.compaction [--device cuda|cpu] [--json FILE] [--sweep]

Bytes are read plus written, of rows that must move (identity moves left out), so 100 % of the copy is the floor. GPU figures are
device time of rounds replayed from a CUDA graph (pack and move); `eager` adds what Python takes to launch them. A round may run
again over its own result: it reads and writes the same cells. `--sweep` tries other ways to cut the work (GPU). Last comes the
share of decoding that whole rounds of the runtime take (`compaction_share.py`).
"""

from __future__ import annotations

import argparse
import faulthandler
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from shared.kernels.compaction import cpu as cpu_mover
from shared.kernels.compaction.inputs import RequestRound, RoundInputs
from shared.kernels.compaction.layout import CacheLayout
from shared.kernels.compaction.modes import Mode, RowMode
from shared.kernels.compaction.moves import hole_filling_moves, ordered_moves
from shared.kernels.compaction.params import CompactionParams, build_compaction_params, compact
from shared.kv_spec import DType, KVCacheSpec, LayerGroup, Layout
from tests.bench.compaction_share import LLAMA_8B, SMOLLM2, decode_shares
from tests.bench.machine import copy_bandwidth, write_json


@dataclass(frozen=True)
class Shape:
    name: str
    layers: int = 32
    batch: int = 32
    valid_len: int = 4096
    keep: int = 2048
    kv_heads: int = 8
    head_dim: int = 128
    dtype: DType = DType.BFLOAT16
    page_size: int = 32
    row_mode: RowMode = RowMode.UNION
    mode: Mode = Mode.ORDERED


BASE = Shape("32 layers, 32 requests, 4096 to 2048")
ONE = replace(BASE, name="batch 1", batch=1)
EIGHT_REQUESTS = replace(BASE, name="batch 8", batch=8)
SMALL_EVICTION = replace(BASE, name="budget 2048 evicting 128", valid_len=2176)
EIGHT = replace(BASE, name="8 layers", layers=8)
GPU_SHAPES = [
    BASE,
    replace(BASE, name="per head", row_mode=RowMode.PER_HEAD),
    replace(BASE, name="per layer and head", row_mode=RowMode.PER_LAYER_HEAD),
    replace(BASE, name="hole filling", mode=Mode.HOLE_FILLING),
    ONE,
    replace(ONE, name="batch 1, 8 layers", layers=8),
    replace(ONE, name="batch 1, hole filling", mode=Mode.HOLE_FILLING),
    replace(BASE, name="batch 4", batch=4),
    EIGHT_REQUESTS,
    SMALL_EVICTION,
    replace(SMALL_EVICTION, name="budget 2048 evicting 128, hole filling", mode=Mode.HOLE_FILLING),
    replace(SMALL_EVICTION, name="batch 1, evicting 128", batch=1),
    replace(SMALL_EVICTION, name="batch 1, evicting 128, hole filling", batch=1, mode=Mode.HOLE_FILLING),
    EIGHT,
    replace(EIGHT, name="float16", dtype=DType.FLOAT16),
    replace(EIGHT, name="float8_e4m3fn", dtype=DType.FLOAT8_E4M3),
    *(replace(EIGHT, name=f"head_dim {head_dim}", head_dim=head_dim) for head_dim in (64, 80, 96, 256)),
    *(replace(EIGHT, name=f"pages of {page_size}", page_size=page_size) for page_size in (16, 64, 128)),
]
CPU_BASE = Shape("8 layers, 4 requests, 4096 to 2048", layers=8, batch=4)
CPU_SHAPES = [
    CPU_BASE,
    replace(CPU_BASE, name="per head", row_mode=RowMode.PER_HEAD),
    replace(CPU_BASE, name="evicting 128", valid_len=2176),
    replace(CPU_BASE, name="evicting 128, hole filling", valid_len=2176, mode=Mode.HOLE_FILLING),
    replace(CPU_BASE, name="float32, head_dim 64, 3 heads", dtype=DType.FLOAT32, head_dim=64, kv_heads=3),
]


@dataclass
class Bench:
    """A shape with its pools, one staged round and the bytes that round must move."""

    shape: Shape
    device: torch.device

    def __post_init__(self) -> None:
        shape, rng = self.shape, np.random.default_rng(0)
        group = LayerGroup(tuple(range(shape.layers)), shape.kv_heads, shape.head_dim, shape.dtype)
        spec = KVCacheSpec((group,), Layout.PAGED, shape.page_size, shape.valid_len)
        num_pages = shape.batch * spec.max_pages + 1
        table = (rng.permutation(num_pages - 1) + 1).astype(np.int32).reshape(shape.batch, spec.max_pages)
        self.table = torch.from_numpy(table).to(self.device)
        dtype = getattr(torch, shape.dtype.value)
        size = spec.pool_shape(group, num_pages)
        self.pools = [torch.ones(size, dtype=torch.uint8, device=self.device).to(dtype) for _ in range(shape.layers)]
        self.layout = CacheLayout.from_spec(spec, self.pools, self.table, shape.mode)
        self.inputs = RoundInputs.allocate(self.layout, row_mode=shape.row_mode, keep_capacity=shape.keep)
        rows = self.inputs.kept.shape[1]
        self.requests = [
            RequestRound(
                np.sort(np.argsort(rng.random((rows, shape.valid_len)), axis=1)[:, : shape.keep], axis=1).astype(np.int32),
                base=0,
                valid_len=shape.valid_len,
            )
            for _ in range(shape.batch)
        ]
        self.count = self.inputs.stage(self.requests)

    @property
    def moved_bytes(self) -> int:
        """Read plus written, over every layer, head, K and V."""
        build = ordered_moves if self.shape.mode is Mode.ORDERED else hole_filling_moves
        moves = sum(len(build(row, 0, self.shape.valid_len, 0)) for request in self.requests for row in request.kept)
        heads = self.shape.layers * self.shape.kv_heads / self.inputs.kept.shape[1]
        return round(moves * heads * 2 * 2 * self.shape.head_dim * self.shape.dtype.itemsize)

    def params(self) -> CompactionParams:
        return build_compaction_params(self.layout, self.inputs)

    def round(self) -> Callable[[], None]:
        """One round, bound."""
        return partial(compact, self.params(), self.count)

    def gather_scatter(self) -> Callable[[], None]:
        """The same (union, ordered) moves with torch: `index_select` of every row of a layer, then `index_copy_`."""
        rows = [ordered_moves(request.kept[0], 0, self.shape.valid_len, 0) for request in self.requests]
        table = self.table.cpu().numpy()
        src = self._row_indices([table[r][m.src // self.shape.page_size] for r, m in enumerate(rows)], [m.src for m in rows])
        dst = self._row_indices([table[r][m.dst // self.shape.page_size] for r, m in enumerate(rows)], [m.dst for m in rows])
        flat = [pool.view(torch.uint8).view(-1, self.shape.head_dim * self.shape.dtype.itemsize) for pool in self.pools]
        flat = [rows.view(torch.int32) for rows in flat]

        def move() -> None:
            for layer in flat:
                layer.index_copy_(0, dst, layer.index_select(0, src))

        return move

    def _row_indices(self, pages: list[np.ndarray], ordinals: list[np.ndarray]) -> torch.Tensor:
        """Index of the K and V row of every head of every cell, in a layer seen as rows."""
        heads, page_size = self.shape.kv_heads, self.shape.page_size
        page = torch.from_numpy(np.concatenate(pages)).long().to(self.device)
        slot = torch.from_numpy(np.concatenate(ordinals)).long().to(self.device) % page_size
        plane = torch.arange(2 * heads, device=self.device)
        return ((page[:, None] * 2 * heads + plane) * page_size + slot[:, None]).flatten()


def gpu_seconds(call: Callable[[], None], repeats: int = 5, inner: int = 4) -> float:
    """Median device seconds of one call, timed with events around `inner` of them."""
    call()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(inner):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / inner)
    return statistics.median(times)


def graphed(call: Callable[[], None], rounds: int = 1) -> Callable[[], None]:
    """`rounds` calls as one graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            call()
    return graph.replay


def bench_gpu(sweep: bool) -> dict[str, Any]:
    device = torch.device("cuda", 0)
    copy = copy_bandwidth(device)
    print(f"device copy {copy / 1e9:.0f} GB/s")
    results: dict[str, Any] = {"copy_bytes_per_s": copy, "shapes": []}
    seconds: dict[str, float] = {}
    for shape in GPU_SHAPES:
        bench = Bench(shape, device)
        call = bench.round()
        rounds = 1 if bench.moved_bytes > 1 << 30 else 16
        taken = gpu_seconds(graphed(call, rounds)) / rounds
        eager = gpu_seconds(call, inner=8)
        row = result_row(shape, bench.moved_bytes, taken, copy) | {"eager_s": eager}
        seconds[shape.name] = taken
        if shape in (BASE, ONE):
            row["torch_s"] = gpu_seconds(bench.gather_scatter(), repeats=3, inner=1)
        if sweep and shape in (BASE, ONE, EIGHT_REQUESTS, SMALL_EVICTION):
            row["sweep"] = sweep_tunings(bench, copy)
        results["shapes"].append(row)
        print_row(row)
        del bench, call
        torch.cuda.empty_cache()
    results["hole_filling_speedup"] = seconds[SMALL_EVICTION.name] / seconds["budget 2048 evicting 128, hole filling"]
    print(f"budget 2048 evicting 128: hole filling takes {results['hole_filling_speedup']:.1f} times less than ordered")
    return results


def sweep_tunings(bench: Bench, copy: float) -> list[dict[str, Any]]:
    """The same round with other tiles and warps, both ways to share out lists."""
    from shared.kernels.compaction.triton import mover as triton_mover

    rows = []
    for way, fill in (("walk", 0), ("split", 1 << 20)):
        for tile_vectors in (256, 512, 1024):
            for warps in (2, 4, 8):
                tuning = triton_mover.Tuning(tile_vectors=tile_vectors, warps=warps, fill=fill)
                launch = triton_mover.bind(bench.params().groups, bench.inputs, None, tuning)
                taken = gpu_seconds(graphed(partial(launch, bench.count)), repeats=3, inner=2)
                share = bench.moved_bytes / taken / copy
                rows.append(asdict(tuning) | {"way": way, "seconds": taken, "share_of_copy": share})
                print(f"    {way:5} tile {tile_vectors:4} warps {warps}: {taken * 1e3:8.3f} ms {share:6.1%}", flush=True)
    return rows


def bench_cpu() -> dict[str, Any]:
    """Copy and rounds in turn, so that both see the same machine; the fastest of each, as others may use the machine too."""
    device = torch.device("cpu")
    source = torch.ones(512 << 20, dtype=torch.uint8)
    target = torch.empty_like(source)
    results: dict[str, Any] = {"threads": torch.get_num_threads(), "shapes": []}
    for shape in CPU_SHAPES:
        bench = Bench(shape, device)
        contestants: dict[str, Callable[[], Any]] = {
            "copy": lambda: target.copy_(source),
            "round": bench.round(),
        }
        if shape == CPU_BASE:
            contestants["torch"] = bench.gather_scatter()
            with patch.object(cpu_mover, "load_library", lambda *_: None):
                contestants["portable"] = bench.round()
        times: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(9):
            for name, call in contestants.items():
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
        taken = {name: min(values) for name, values in times.items()}
        copy = 2 * source.numel() / taken["copy"]
        row = result_row(shape, bench.moved_bytes, taken["round"], copy) | {"copy_bytes_per_s": copy}
        row |= {f"{name}_s": taken[name] for name in ("torch", "portable") if name in taken}
        results["shapes"].append(row)
        print_row(row)
    return results


def result_row(shape: Shape, moved_bytes: int, seconds: float, copy: float) -> dict[str, Any]:
    rate = moved_bytes / seconds
    return asdict(shape) | {"bytes": moved_bytes, "seconds": seconds, "bytes_per_s": rate, "share_of_copy": rate / copy}


def print_row(row: dict[str, Any]) -> None:
    extras = [f"{name.removesuffix('_s')} {row[name] * 1e3:.3f} ms" for name in ("eager_s", "torch_s", "portable_s") if name in row]
    print(
        f"{row['name']:42} {row['bytes'] / 1e9:7.3f} GB {row['seconds'] * 1e3:9.3f} ms {row['bytes_per_s'] / 1e9:7.1f} GB/s "
        f"{row['share_of_copy']:6.1%} of copy  {', '.join(extras)}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument(
        "--limit", type=float, default=480, help="seconds after which the run is given up, say because a kernel hangs"
    )
    arguments = parser.parse_args()
    faulthandler.dump_traceback_later(arguments.limit, exit=True)
    if arguments.device == "cuda":
        results = bench_gpu(arguments.sweep)
        results["decode_share"] = decode_shares(LLAMA_8B, torch.device("cuda", 0))
    else:
        results = bench_cpu()
        results["decode_share"] = decode_shares(SMOLLM2, torch.device("cpu"))
    if arguments.json is not None:
        write_json(arguments.json, results)


if __name__ == "__main__":
    main()

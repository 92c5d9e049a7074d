"""Attention on an NVIDIA GPU: the Triton ops against the reference, then their speed beside torch's on contiguous tensors.

    python -m tests.gpu.attention_check [--json PATH] [--sweep]

Needs torch, triton and this repository, no pytest. About two minutes, a third of them compiling. Prints one table and writes it as
JSON with card, versions and date to PATH, by default `$OUT/attention.json`. Exit status 1 if an output is wrong; a missed speed
target is printed, not an error. `--sweep` also times other tiles than the plan's, to choose its constants by.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from shared.kernels.attention import ops, reference
from shared.kernels.attention.triton import launch
from shared.kernels.attention.triton.plan import AttendPlan
from tests.bench.machine import copy_bandwidth
from tests.support.attention.cases import TOLERANCE, Case, bits, catalogue, make

WORKERS = 8
LONG = (
    Case(torch.bfloat16, kv_heads=4, group=4, dim=128, page_size=32, starts=(0, 1, 700, 2990, 31, 32, 33), capacity=3008),
    Case(torch.bfloat16, kv_heads=2, group=4, dim=128, page_size=16, starts=(2900,), capacity=3008, sinks=True, window=1000),
    Case(torch.float16, kv_heads=2, group=8, dim=64, page_size=64, count=300, starts=(0, 900), capacity=1280),
    Case(torch.bfloat16, kv_heads=1, group=4, dim=128, page_size=32, count=700, starts=(0, 300), capacity=1024, window=200),
    Case(torch.float32, kv_heads=3, group=3, dim=64, page_size=32, count=130, starts=(0, 500), capacity=640, softcap=20.0),
)


# Correctness


def check_case(case: Case, device: torch.device) -> None:
    """Both ops against the reference on the CPU, with NaN wherever no query may look."""
    inputs = make(case)
    on_device = inputs.on(device)
    want = reference.paged_attend(*inputs.paged_arguments())
    tolerance = dict(TOLERANCE[case.dtype])
    if case.dtype != torch.float32:  # weights are rounded before they meet the values
        tolerance["atol"] = max(tolerance["atol"], 2**-6 if case.dtype == torch.bfloat16 else 2**-9)
    got = launch.paged_attend(*on_device.paged_arguments())
    if not torch.equal(bits(on_device.storage.cpu()), bits(inputs.storage)):
        raise AssertionError("the pool differs from the reference's")
    torch.testing.assert_close(got.cpu(), want, **tolerance)
    linear = launch.attend(on_device.q, *on_device.caches(), on_device.start, *on_device.options)
    torch.testing.assert_close(linear.cpu(), want, **tolerance)


def check_share(cases: list[Case]) -> list[tuple[str, str]]:
    """(case, error) of every case; the error is empty where all is right."""
    device = torch.device("cuda")
    results = []
    for case in cases:
        try:
            check_case(case, device)
            results.append((str(case), ""))
        except Exception as error:  # noqa: BLE001 - one report of everything that fails, compiler errors included
            results.append((str(case), f"{type(error).__name__}: {str(error)[:800]} {traceback.format_exc(limit=-1)[-300:]}"))
    return results


def check_far_pages(device: torch.device) -> None:
    """Pages past 2^31 elements of one pool."""
    case = Case(torch.bfloat16, kv_heads=8, group=4, dim=128, page_size=32, starts=(70, 20), capacity=96)
    inputs = make(case)
    want = reference.paged_attend(*inputs.copy().paged_arguments())
    num_pages = 40_000
    pool = torch.empty(num_pages, *inputs.pool.shape[1:], dtype=case.dtype, device=device)
    far = num_pages - inputs.pool.shape[0]
    assert far * pool.stride(0) > 2**31
    pool[far:] = inputs.pool.to(device)
    moved = inputs.on(device)
    got = launch.paged_attend(moved.q, moved.k, moved.v, pool, moved.table + far, moved.start, 0, *moved.options)
    torch.testing.assert_close(got.cpu(), want, rtol=2**-7, atol=2**-6)


def check_capture(device: torch.device) -> None:
    """The registered op captured once and replayed on other queries, starts and tables; no call waits for the device."""
    ops.load_ops()
    first, second = (
        make(Case(torch.bfloat16, dim=128, page_size=32, starts=starts), seed)
        for seed, starts in enumerate([(5, 60, 9), (90, 1, 40)])
    )
    static = first.on(device)
    torch.ops.quire.paged_attend(*static.paged_arguments())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    torch.ops.quire.paged_attend(*static.paged_arguments())
    torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = torch.ops.quire.paged_attend(*static.paged_arguments())
    for inputs in (second, first):
        for name in ("q", "k", "v", "table", "start", "storage"):
            getattr(static, name).copy_(getattr(inputs, name))
        graph.replay()
        want = reference.paged_attend(*inputs.copy().paged_arguments())
        torch.testing.assert_close(out.cpu(), want, rtol=2**-7, atol=2**-6)


def check_all(device: torch.device) -> list[tuple[str, str]]:
    cases = [*catalogue(), *LONG]
    with multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
        results = [result for share in pool.map(check_share, [cases[i::WORKERS] for i in range(WORKERS)]) for result in share]
    for check in (check_far_pages, check_capture):
        try:
            check(device)
            results.append((check.__name__, ""))
        except Exception as error:  # noqa: BLE001 - as above
            results.append((check.__name__, f"{type(error).__name__}: {str(error)[:800]} {traceback.format_exc(limit=-2)[-500:]}"))
    return results


# Speed


def milliseconds(call: Callable[[], object], inner: int = 10, replays: int = 9) -> float:
    """Device time of one call: the median replay of a graph of `inner` calls, so that launches do not count."""
    stream = torch.cuda.Stream()
    # The inputs are still being made on the stream that the caller uses.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(inner):
            call()
    for _ in range(30):
        graph.replay()  # the first load measured would otherwise meet a card that has not reached its clocks
    times = []
    for _ in range(replays + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / inner)
    return statistics.median(times[1:])


def host_microseconds(call: Callable[[], object], calls: int = 20) -> float:
    """What the host needs to enqueue one call, which only matters outside of CUDA graphs."""
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    spent = time.perf_counter() - begin
    torch.cuda.synchronize()
    return spent / calls * 1e6


@dataclass(frozen=True)
class Load:
    """`count` new tokens in each of `batch` rows that then hold `length` cells."""

    batch: int
    count: int
    length: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    page_size: int = 32
    linear: bool = False
    window: int | None = None

    def __str__(self) -> str:
        name = f"B{self.batch} n{self.count} L{self.length} {self.heads}/{self.kv_heads}x{self.dim}"
        return name + (" linear" if self.linear else f" pages {self.page_size}") + (f" window {self.window}" if self.window else "")

    @property
    def kv_bytes(self) -> int:
        seen = self.length if self.window is None else min(self.length, self.window + self.count - 1)
        return 2 * 2 * self.batch * self.kv_heads * seen * self.dim

    @property
    def flops(self) -> float:
        """Of both products over the cells each query sees."""
        pairs = self.count * (self.length - self.count) + self.count * (self.count + 1) / 2
        return 4 * self.batch * self.heads * self.dim * pairs


def op_call(load: Load, device: torch.device) -> Callable[[], Tensor]:
    page_size = load.length if load.linear else load.page_size
    width = -(-load.length // page_size)
    num_pages = load.batch * width + 1
    outer = (2, num_pages) if load.linear else (num_pages, 2)
    pool = torch.randn(*outer, load.kv_heads, page_size, load.dim, dtype=torch.bfloat16, device=device)
    table = (torch.randperm(num_pages - 1, device=device) + 1).view(load.batch, width).to(torch.int32)
    start = torch.full((load.batch,), load.length - load.count, dtype=torch.int32, device=device)
    q, k, v = (
        torch.randn(load.batch, load.count, heads, load.dim, dtype=torch.bfloat16, device=device).transpose(1, 2)
        for heads in (load.heads, load.kv_heads, load.kv_heads)
    )
    return lambda: launch.paged_attend(q, k, v, pool, table, start, int(load.linear), load.dim**-0.5, load.window, None, None)


def sdpa_milliseconds(load: Load, device: torch.device) -> dict[str, float]:
    """Of every backend of torch's SDPA that takes the shape; contiguous keys and values, written for free."""
    q, k, v = (
        torch.randn(load.batch, heads, tokens, load.dim, dtype=torch.bfloat16, device=device)
        for heads, tokens in ((load.heads, load.count), (load.kv_heads, load.length), (load.kv_heads, load.length))
    )
    causal = load.count > 1
    assert not causal or load.count == load.length
    times = {}
    for name, backends in {
        "default": None, "flash": [SDPBackend.FLASH_ATTENTION], "cudnn": [SDPBackend.CUDNN_ATTENTION],
        "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    }.items():  # fmt: skip

        def call() -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

        try:
            if backends is None:
                times[name] = milliseconds(call)
            else:
                with sdpa_kernel(backends):
                    times[name] = milliseconds(call)
        except RuntimeError as error:
            print(f"  sdpa {name} does not take {load}: {str(error).splitlines()[0][:100]}")
    return times


def measure(load: Load, device: torch.device, bandwidth: float, *, compare: bool) -> dict[str, Any]:
    call = op_call(load, device)
    ms = milliseconds(call)
    row: dict[str, Any] = {
        "load": str(load),
        "ms": ms,
        "host_us": host_microseconds(call),
        "GB_s": load.kv_bytes / ms / 1e6,
        "TFLOP_s": load.flops / ms / 1e9,
    }
    row["of_copy"] = row["GB_s"] * 1e9 / bandwidth
    if compare:
        row["sdpa_ms"] = sdpa_milliseconds(load, device)
        row["of_sdpa"] = min(row["sdpa_ms"].values()) / ms
        row["of_sdpa_default"] = row["sdpa_ms"]["default"] / ms
    torch.cuda.empty_cache()
    return row


DECODE = Load(32, 1, 4096)
PREFILL = Load(1, 4096, 4096)
OTHERS = (
    Load(1, 1, 2048),
    Load(8, 1, 2048),
    Load(64, 1, 2048),
    Load(1, 1, 32768),
    replace(DECODE, page_size=16),
    replace(DECODE, page_size=64),
    replace(DECODE, linear=True),
    replace(DECODE, window=1024),
    replace(DECODE, heads=32, kv_heads=32),
    replace(DECODE, heads=16, kv_heads=2),
    replace(DECODE, count=4),
    Load(4, 512, 4096),
)

SWEEPS = {
    DECODE: [
        *(AttendPlan(16, block_n, splits, warps, stages) for block_n, splits, warps, stages in (
            (64, 1, 4, 3), (64, 1, 4, 5), (64, 1, 4, 7), (64, 2, 4, 5), (64, 3, 4, 5), (64, 4, 4, 5), (64, 2, 4, 7), (32, 2, 4, 7),
            (32, 3, 4, 5), (128, 1, 4, 5), (128, 2, 4, 5), (128, 1, 8, 5), (128, 2, 4, 3), (64, 2, 2, 5), (64, 3, 2, 5))),
    ],
    PREFILL: [
        AttendPlan(128, 64, 1, 8, 3), AttendPlan(128, 64, 1, 8, 5), AttendPlan(128, 128, 1, 8, 3), AttendPlan(128, 32, 1, 8, 5),
        AttendPlan(64, 64, 1, 4, 3), AttendPlan(64, 64, 1, 4, 5), AttendPlan(64, 128, 1, 4, 3), AttendPlan(128, 64, 1, 4, 3),
    ],
}  # fmt: skip


def sweep(device: torch.device, bandwidth: float) -> list[dict[str, Any]]:
    """Time of each of SWEEPS' plans in place of the planner's."""
    rows = []
    for load, plans in SWEEPS.items():
        for plan in plans:
            try:
                with patch.object(launch, "plan_attend", lambda plan=plan, **_: plan):
                    row = measure(load, device, bandwidth, compare=False) | {"plan": str(plan)}
                print(
                    f"  {load} {plan}: {row['ms']:.4f} ms, {row['of_copy']:.2f} of copy, {row['TFLOP_s']:.0f} TFLOP/s", flush=True
                )
                rows.append(row)
            except Exception as error:  # noqa: BLE001 - a plan that does not fit is a result too
                print(f"  {load} {plan}: {type(error).__name__} {str(error)[:100]}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path(os.environ.get("OUT", ".")) / "attention.json")
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda")
    report: dict[str, Any] = {
        "card": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    print(*report.values())
    checks = check_all(device)
    report["failures"] = {name: error for name, error in checks if error}
    report["checked"] = len(checks)
    print(f"{len(checks)} checks, {len(report['failures'])} failures")
    for name, error in report["failures"].items():
        print(f"  {name}: {error}")

    bandwidth = copy_bandwidth(device)
    report["copy_GB_s"] = bandwidth / 1e9
    print(f"copy {bandwidth / 1e9:.0f} GB/s")
    print(f"{'load':44} {'ms':>9} {'host us':>8} {'GB/s':>7} {'of copy':>8} {'TFLOP/s':>8} {'of best sdpa':>13} {'of default':>11}")
    report["loads"] = []
    for load in (DECODE, PREFILL, *OTHERS):
        row = measure(load, device, bandwidth, compare=load.window is None and load.count in (1, load.length))
        report["loads"].append(row)
        ratios = f"{row['of_sdpa']:13.2f} {row['of_sdpa_default']:11.2f}" if "of_sdpa" in row else ""
        figures = f"{row['ms']:9.4f} {row['host_us']:8.0f} {row['GB_s']:7.0f} {row['of_copy']:8.2f} {row['TFLOP_s']:8.1f}"
        print(f"{row['load']:44} {figures} {ratios}", flush=True)
    decode, prefill = report["loads"][:2]
    report["targets"] = [
        {"name": "decode, of copy bandwidth", "value": decode["of_copy"], "target": 0.85},
        {"name": "decode, of the fastest SDPA's speed", "value": decode["of_sdpa"], "target": 0.90},
        {"name": "prefill, of the fastest SDPA's speed", "value": prefill["of_sdpa"], "target": 0.60},
    ]
    for target in report["targets"]:
        verdict = "met   " if target["value"] >= target["target"] else "MISSED"
        print(f"{verdict} {target['name']}: {target['value']:.2f} (target {target['target']})")
    if options.sweep:
        report["sweep"] = sweep(device, bandwidth)
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    raise SystemExit(bool(report["failures"]))


if __name__ == "__main__":
    main()

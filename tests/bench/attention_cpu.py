"""Attention on the CPU: the compiled paged op beside torch SDPA on a contiguous cache, torch gather + SDPA, and the reference.

    python -m tests.bench.attention_cpu [--threads N] [--repeat N]

Prints one row a shape: microseconds of each, and how many times as long SDPA and the gather take as the op (above 1.00 the op is
faster; it also writes the new rows, which the others find written). The contestants alternate and the fastest call of each counts;
still, run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.kernels.attention import reference
from shared.kernels.attention.ops import implementation

PAGE_SIZE = 32


@dataclass(frozen=True)
class Shape:
    batch: int
    count: int
    length: int
    dtype: torch.dtype
    heads: int = 9
    kv_heads: int = 3
    dim: int = 64

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"B{self.batch} n{self.count} L{self.length} {self.heads}/{self.kv_heads}x{self.dim} {name}"


SHAPES = [
    *(
        Shape(b, 1, length, dtype)
        for dtype, b, length in itertools.product((torch.float32, torch.bfloat16), (1, 4, 8), (128, 1024))
    ),
    *(Shape(b, 1, 1024, dtype, 32, 8, 128) for dtype, b in itertools.product((torch.float32, torch.bfloat16), (1, 8))),
    *(Shape(1, n, n, dtype) for dtype, n in itertools.product((torch.float32, torch.bfloat16), (16, 128, 512))),
    *(Shape(1, 128, 1024, dtype) for dtype in (torch.float32, torch.bfloat16)),
]


def contestants(shape: Shape) -> dict[str, Callable[[], Tensor]]:
    """Name -> one call; every one attends `count` queries to `length` cells, its own the last."""
    batch, count, length, scale = shape.batch, shape.count, shape.length, shape.dim**-0.5
    width = -(-length // PAGE_SIZE)
    q = torch.randn(batch, count, shape.heads, shape.dim).to(shape.dtype).transpose(1, 2)
    k, v = (torch.randn(batch, shape.kv_heads, count, shape.dim).to(shape.dtype) for _ in range(2))
    keys, values = (torch.randn(batch, shape.kv_heads, length, shape.dim).to(shape.dtype) for _ in range(2))
    pool = torch.randn(batch * width + 1, 2, shape.kv_heads, PAGE_SIZE, shape.dim).to(shape.dtype)
    table = torch.randperm(batch * width).add(1).view(batch, width).to(torch.int32)
    start = torch.full((batch,), length - count, dtype=torch.int32)
    mask = torch.ones(count, length, dtype=torch.bool).tril(length - count)
    long_table, arguments = table.long(), (pool, table, start, 0, scale, None, None, None)

    def sdpa(keys: Tensor, values: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=None if count == 1 else mask, scale=scale, enable_gqa=True)

    def gather() -> Tensor:
        pages = pool[long_table].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[:, :, :, :length]
        return sdpa(pages[0], pages[1])

    return {
        "cpp": lambda: torch.ops.quire.paged_attend(q, k, v, *arguments),
        "sdpa": lambda: sdpa(keys, values),
        "gather": gather,
        "reference": lambda: reference.paged_attend(q, k, v, *arguments),
    }


def fastest_us(calls: dict[str, Callable[[], Tensor]], repeat: int) -> dict[str, float]:
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(repeat):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            best[name] = min(best[name], (time.perf_counter() - begin) * 1e6)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeat", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    capability = torch.backends.cpu.get_cpu_capability()
    print(f"implementation {implementation()}, {options.threads} threads, torch {torch.__version__}, {capability}")
    print(f"{'shape':34} {'cpp':>9} {'sdpa':>9} {'gather':>9} {'reference':>10}   us; sdpa/cpp gather/cpp")
    for shape in SHAPES:
        us = fastest_us(contestants(shape), options.repeat if shape.count < 128 else max(10, options.repeat // 10))
        ratios = f"{us['sdpa'] / us['cpp']:8.2f} {us['gather'] / us['cpp']:10.2f}"
        print(f"{shape!s:34} {us['cpp']:9.0f} {us['sdpa']:9.0f} {us['gather']:9.0f} {us['reference']:10.0f}   {ratios}")


if __name__ == "__main__":
    main()

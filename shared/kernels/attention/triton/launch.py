"""CUDA implementations of the attention ops: plan on the host from shapes, then launches only.

Nothing waits for the device: calls can be captured in CUDA graphs. Under TRITON_INTERPRET=1 the same launches run on the CPU.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
from torch import Tensor

from shared.kernels.attention.reference import empty_output
from shared.kernels.attention.triton.kernels import attend_kernel, reduce_kernel, write_kernel
from shared.kernels.attention.triton.plan import next_power_of_two, plan_attend

MAX_HEAD_DIM = 256


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    start: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """See `reference.attend`; head_dim at most 256."""
    return _attend(
        q,
        k_cache,
        v_cache,
        None,
        start,
        k_cache.stride()[:3],
        v_cache.stride()[:3],
        k_cache.shape[2],
        scale,
        window,
        softcap,
        sinks,
    )


def paged_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pool: Tensor,
    block_table: Tensor,
    start: Tensor,
    page_dim: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """See `reference.paged_attend`; head_dim at most 256."""
    write_rows(k, v, pool, block_table, start, page_dim)
    keys, values = pool.select(1 - page_dim, 0), pool.select(1 - page_dim, 1)
    strides = keys.stride()[:3]
    return _attend(q, keys, values, block_table, start, strides, strides, pool.shape[3], scale, window, softcap, sinks)


def write_rows(k: Tensor, v: Tensor, pool: Tensor, block_table: Tensor, start: Tensor, page_dim: int) -> None:
    """Write `k, v [B, K, n, D]` at ordinals `start[b] .. start[b] + n` through the block table, in place on `pool`."""
    batch, kv_heads, count, dim = k.shape
    k, v, table = _with_contiguous_rows(k), _with_contiguous_rows(v), _with_contiguous_rows(block_table)
    page_size = pool.shape[3]
    block_n = min(64, next_power_of_two(count))
    write_kernel[(triton.cdiv(count, block_n), kv_heads, batch)](
        k,
        v,
        pool,
        table,
        start,
        count,
        table.stride(0),
        *k.stride()[:3],
        *v.stride()[:3],
        pool.stride(page_dim),
        pool.stride(1 - page_dim),
        pool.stride(2),
        pool.stride(3),
        PAGE_SIZE=page_size,
        DIM=dim,
        BLOCK_D=next_power_of_two(dim),
        BLOCK_N=block_n,
        num_warps=4 if block_n > 8 else 1,
    )


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor | None,
    start: Tensor,
    key_strides: tuple[int, ...],
    value_strides: tuple[int, ...],
    page_size: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention over pages of `page_size` cells, without a block table one a row; strides are of (page, head, token)."""
    batch, heads, count, dim = q.shape
    if dim > MAX_HEAD_DIM:
        raise ValueError(f"q: expected head_dim of at most {MAX_HEAD_DIM}, got {dim}")
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    q = _with_contiguous_rows(q)
    out = empty_output(q)
    table = start if block_table is None else _with_contiguous_rows(block_table)
    plan = plan_attend(
        batch=batch,
        kv_heads=kv_heads,
        group=group,
        count=count,
        head_dim=dim,
        itemsize=q.element_size(),
        capacity=page_size if block_table is None else page_size * table.shape[1],
        num_sms=_num_sms(q.device),
    )
    splits = plan.splits
    partial = q.new_empty((batch, heads, count, splits, dim), dtype=torch.float32) if splits > 1 else out
    stats = q.new_empty((2, batch, heads, count, splits), dtype=torch.float32) if splits > 1 else out
    has_sinks = sinks is not None
    sinks = sinks if sinks is not None else out
    attend_kernel[(triton.cdiv(count * group, plan.block_m) * splits, kv_heads, batch)](
        q,
        keys,
        values,
        out,
        partial,
        stats,
        table,
        start,
        sinks,
        scale if softcap else scale * math.log2(math.e),
        count,
        table.stride(0),
        *q.stride()[:3],
        *key_strides,
        *value_strides,
        *out.stride()[:3],
        GROUP=group,
        PAGE_SIZE=page_size,
        PAGED=block_table is not None,
        WINDOW=window or 0,
        SOFTCAP=softcap or 0.0,
        SINKS=has_sinks,
        DIM=dim,
        BLOCK_D=max(16, next_power_of_two(dim)),
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        SPLITS=splits,
        WIDE=q.device.type == "cpu" and q.dtype == torch.bfloat16,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )
    if splits > 1:
        reduce_kernel[(batch * heads * count,)](
            partial,
            stats,
            sinks,
            out,
            batch * heads * count,
            heads,
            count,
            *out.stride()[:3],
            SINKS=has_sinks,
            DIM=dim,
            BLOCK_D=next_power_of_two(dim),
            SPLITS=splits,
            BLOCK_S=next_power_of_two(splits),
            num_warps=4,
        )
    return out


def _with_contiguous_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@functools.cache
def _num_sms(device: torch.device) -> int:
    """Multiprocessors of the device; 4 for the interpreter, so that small tests split too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4

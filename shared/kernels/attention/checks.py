"""What the attention ops ask of their arguments. ValueError names the argument, what was expected and what came.

Values (starts, page ids) are read where they are on the CPU. On a GPU reading them would stall the stream: there the caller answers
for them, as the runtime does from its own tables before every launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shared.kernels.attention.reference import visible_cells

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, start: Tensor, window: int | None, softcap: float | None, sinks: Tensor | None
) -> None:
    """Raise ValueError unless `quire::attend` may run on these; shapes as in `reference.attend`."""
    _expect(k_cache.dim() == 4, "k_cache", "[batch, kv_heads, cells, head_dim]", _shape(k_cache))
    _check_queries(q, k_cache.shape[1], start, window, softcap, sinks)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        _check_like(name, cache, q)
        _check_shape(name, cache, (q.shape[0], k_cache.shape[1], k_cache.shape[2], q.shape[3]))
        _expect(cache.stride(-1) == 1, name, "head_dim of stride 1", f"stride {cache.stride(-1)}")
    _check_starts(start, q.shape[2], k_cache.shape[2])


def check_paged_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pool: Tensor,
    block_table: Tensor,
    start: Tensor,
    page_dim: int,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """Raise ValueError unless `quire::paged_attend` may run on these; shapes as in `reference.paged_attend`."""
    _expect(page_dim in (0, 1), "page_dim", "0 (paged) or 1 (linear)", page_dim)
    _expect(pool.dim() == 5, "pool", "5 axes: pages and K/V in either order, kv_heads, page_size, head_dim", _shape(pool))
    num_pages, planes = pool.shape[page_dim], pool.shape[1 - page_dim]
    kv_heads, page_size, head_dim = pool.shape[2:]
    _check_queries(q, kv_heads, start, window, softcap, sinks)
    _expect(planes == 2, "pool", f"2 planes, K and V, on axis {1 - page_dim}", planes)
    for name, tensor in (("k", k), ("v", v), ("pool", pool)):
        _check_like(name, tensor, q)
    for name, new in (("k", k), ("v", v)):
        _check_shape(name, new, (q.shape[0], kv_heads, q.shape[2], q.shape[3]))
    _expect(head_dim == q.shape[3], "pool", f"head_dim {q.shape[3]} like q", head_dim)
    _expect(pool.stride(-1) == 1, "pool", "head_dim of stride 1", f"stride {pool.stride(-1)}")
    _check_index("block_table", block_table, q)
    _expect(
        block_table.dim() == 2 and block_table.shape[0] == q.shape[0],
        "block_table",
        f"[{q.shape[0]}, max_pages]",
        _shape(block_table),
    )
    _check_starts(start, q.shape[2], block_table.shape[1] * page_size)
    _check_pages(block_table, start, q.shape[2], window, page_size, num_pages)


def _check_queries(
    q: Tensor, kv_heads: int, start: Tensor, window: int | None, softcap: float | None, sinks: Tensor | None
) -> None:
    _expect(q.dim() == 4, "q", "[batch, heads, count, head_dim]", _shape(q))
    _expect(q.dtype in DTYPES, "q", "float32, bfloat16 or float16", q.dtype)
    _expect(kv_heads > 0 and q.shape[1] % kv_heads == 0, "q", f"a multiple of {kv_heads} kv heads", f"{q.shape[1]} heads")
    _check_index("start", start, q)
    _check_shape("start", start, (q.shape[0],))
    _expect(window is None or window >= 1, "window", "at least 1 or None", window)
    _expect(softcap is None or softcap > 0, "softcap", "above 0 or None", softcap)
    if sinks is not None:
        _expect(sinks.device == q.device, "sinks", f"device {q.device} like q", sinks.device)
        _expect(sinks.dtype in (torch.float32, q.dtype), "sinks", f"float32 or {q.dtype} like q", sinks.dtype)
        _check_shape("sinks", sinks, (q.shape[1],))


def _check_starts(start: Tensor, count: int, capacity: int) -> None:
    if start.device.type != "cpu":
        return
    for row, first in enumerate(start.tolist()):
        room = f"0..{capacity - count} (room for {count} new tokens in {capacity} cells)"
        _expect(0 <= first <= capacity - count, f"start[{row}]", room, first)


def _check_pages(table: Tensor, start: Tensor, count: int, window: int | None, page_size: int, num_pages: int) -> None:
    """Every page that holds a visible cell exists; other entries are never read."""
    if table.device.type != "cpu":
        return
    for row, first in enumerate(start.tolist()):
        begin, end = visible_cells(first, count, window)
        first_page = begin // page_size
        for page, page_id in enumerate(table[row, first_page : -(-end // page_size)].tolist(), first_page):
            _expect(0 <= page_id < num_pages, f"block_table[{row}, {page}]", f"a page in 0..{num_pages - 1}", page_id)


def _check_like(name: str, tensor: Tensor, q: Tensor) -> None:
    _expect(tensor.device == q.device, name, f"device {q.device} like q", tensor.device)
    _expect(tensor.dtype == q.dtype, name, f"{q.dtype} like q", tensor.dtype)


def _check_index(name: str, tensor: Tensor, q: Tensor) -> None:
    _expect(tensor.device == q.device, name, f"device {q.device} like q", tensor.device)
    _expect(tensor.dtype == torch.int32, name, "int32", tensor.dtype)


def _check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    _expect(_shape(tensor) == shape, name, shape, _shape(tensor))


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _expect(holds: bool, name: str, expected: object, got: object) -> None:
    if not holds:
        raise ValueError(f"{name}: expected {expected}, got {got}")

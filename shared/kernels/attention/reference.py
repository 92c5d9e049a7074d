"""The specification of both attention ops, in plain torch: one row at a time, float32 maths, slow and obvious.

It is also what runs on the CPU where the compiled op cannot be built.

Shape suffixes: B rows, H query heads, K kv heads, n new tokens, S cells of a cache, P pages, M block-table width, D head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor


def visible_cells(start: int, count: int, window: int | None) -> tuple[int, int]:
    """Half-open range of cells that at least one of `count` queries of a row sees, whose first query sits at cell `start`."""
    begin = 0 if window is None else max(0, start + 1 - window)
    return begin, start + count


def empty_output(q: Tensor) -> Tensor:
    """Uninitialised `[B, H, n, D]` laid out token-major, so that `out.transpose(1, 2).reshape(B, n, H * D)` is a view.

    Every implementation returns exactly these strides: compiled programs are generated for them.
    """
    batch, heads, count, dim = q.shape
    return q.new_empty((batch, count, heads, dim)).transpose(1, 2)


def by_page(pool: Tensor, page_dim: int) -> Tensor:
    """View of a pool of either layout as `[P, 2, K, page_size, D]`."""
    return pool.transpose(0, 1) if page_dim == 1 else pool


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
    """Attention of `q [B, H, n, D]` over `k_cache, v_cache [B, K, S, D]`; returns `[B, H, n, D]` in q's dtype.

    Query i of row b sits at cell `start[b] + i` and sees cells `j <= start[b] + i`, of those only the newest `window`, itself
    included, where there is one. Query head h reads kv head `h // (H // K)`. Scores are `scale * q.k`; `softcap` c makes them
    `c * tanh(score / c)`; `sinks [H]` adds one logit a head to the softmax's denominator. Cells that no query of their row
    sees are not read.
    """
    out = empty_output(q)
    count = q.shape[2]
    for row, first in enumerate(start.tolist()):
        begin, end = visible_cells(first, count, window)
        keys, values = k_cache[row, :, begin:end], v_cache[row, :, begin:end]
        out[row] = _attend_row(q[row], keys, values, first - begin, scale, window, softcap, sinks)
    return out


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
    """Write `k, v [B, K, n, D]` at ordinals `start[b] .. start[b] + n` of each row, in place, then `attend` over the row's cells.

    `pool` is one layer's pool tensor of any strides, `page_dim` the axis that counts its pages (0 paged, 1 linear);
    `block_table [B, M]` maps ordinal page to page. Only pages that hold visible cells are looked up.
    """
    pages = by_page(pool, page_dim)
    page_size = pages.shape[3]
    count = q.shape[2]
    ordinals = start.long()[:, None] + torch.arange(count, device=start.device)
    page_ids, cells = block_table.long().gather(1, ordinals // page_size), ordinals % page_size
    for kind, new in enumerate((k, v)):
        pages[:, kind].transpose(1, 2)[page_ids, cells] = new.transpose(1, 2)

    out = empty_output(q)
    for row, first in enumerate(start.tolist()):
        begin, end = visible_cells(first, count, window)
        first_page = begin // page_size
        origin = first_page * page_size
        mapped = block_table[row, first_page : -(-end // page_size)].long()
        keys, values = (pages[mapped, kind].transpose(0, 1).flatten(1, 2)[:, begin - origin : end - origin] for kind in (0, 1))
        out[row] = _attend_row(q[row], keys, values, first - begin, scale, window, softcap, sinks)
    return out


def _attend_row(
    q_HnD: Tensor,
    k_KSD: Tensor,
    v_KSD: Tensor,
    first: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of one row over exactly its visible cells; query 0 sits at cell `first` of them."""
    heads, count, _ = q_HnD.shape
    group = heads // k_KSD.shape[0]
    keys, values = (cache.float().repeat_interleave(group, dim=0) for cache in (k_KSD, v_KSD))
    scores = scale * (q_HnD.float() @ keys.mT)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)

    cells = torch.arange(keys.shape[1], device=keys.device)
    own = first + torch.arange(count, device=keys.device)[:, None]
    visible = cells <= own
    if window is not None:
        visible &= cells > own - window
    scores = scores.masked_fill(~visible, -torch.inf)

    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(heads, count, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[1]]
    return (weights @ values).to(q_HnD.dtype)

"""Checked attention for direct callers: arguments are refused by name before any byte moves, then one op runs."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.kernels.attention.checks import check_attend, check_paged_attend
from shared.kernels.attention.ops import load_ops


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    start: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention over per-row caches; shapes and meaning as in `reference.attend`. ValueError on arguments that do not fit."""
    load_ops()
    check_attend(q, k_cache, v_cache, start, window, softcap, sinks)
    out: Tensor = torch.ops.quire.attend(q, k_cache, v_cache, start, scale, window, softcap, sinks)
    return out


def paged_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pool: Tensor,
    block_table: Tensor,
    start: Tensor,
    *,
    page_dim: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Write new rows into a pool, in place, and attend through the block table; shapes and meaning as in `reference.paged_attend`.

    ValueError on arguments that do not fit, with the pool untouched. Rows of one call must not write the same cell, except for
    rows that pad a batch: they share the dump page.
    """
    load_ops()
    check_paged_attend(q, k, v, pool, block_table, start, page_dim, window, softcap, sinks)
    out: Tensor = torch.ops.quire.paged_attend(q, k, v, pool, block_table, start, page_dim, scale, window, softcap, sinks)
    return out

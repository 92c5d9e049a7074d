"""How a product of few rows is cut, from shapes alone. Pure; nothing is tuned at run time.

Constants are measured on an H200 at the shapes of an 8B decoder (bf16, bytes of weights a second beside cuBLAS):

    outputs x inputs      1 row            8 rows           32 rows          64 rows
    6144 x 4096 (q, k, v) 3045 (1762)      2906 (1690)      2917 (1616)      2723 (1671)
    4096 x 4096           2655 (2402)      2666 (2447)      2372 (2302)      library
    28672 x 4096 (gate, up) 3959 (3645)    4065 (3444)      3925 (3591)      3767 (3431)
    4096 x 14336          library          library          library          library
    128256 x 4096         4513 (3897)      4441 (4315)      4283 (4056)      4135 (3831)
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_ROWS = 64
MAX_WEIGHTS = 3
_BLOCK_K = 128
_WIDE_GROUP = 6144
"""Outputs from which tiles of 64 fill the chip."""
_WIDEST_NARROW = 4096
"""Inputs up to which a narrower group is worth a launch of ours: the library splits longer sums."""


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """Tiles of `block_n` outputs by `block_k` inputs, `stages` of them in flight; rows are padded to `block_m`."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    stages: int


def plan_linears(*, rows: int, outputs: int, inputs: int, weights: int, itemsize: int) -> LinearPlan | None:
    """Plan for `rows` rows by `weights` weights of `outputs` outputs in all; None where the matrix library is the faster one."""
    if not 1 <= rows <= MAX_ROWS or weights > MAX_WEIGHTS or itemsize != 2 or inputs % _BLOCK_K:
        return None
    block_m = max(16, 1 << (rows - 1).bit_length())
    if outputs >= _WIDE_GROUP:
        if block_m == 64 and outputs > 2 * _WIDE_GROUP:
            return LinearPlan(block_m, 128, 64, 8, 5)
        return LinearPlan(block_m, 64, _BLOCK_K, 4, 4)
    if block_m == 64 or inputs > _WIDEST_NARROW:
        return None
    return LinearPlan(block_m, 16, _BLOCK_K, 2, 6) if block_m == 16 else LinearPlan(block_m, 64, _BLOCK_K, 4, 4)

"""How a product of few rows is cut, from shapes alone. Pure; nothing is tuned at run time."""

from __future__ import annotations

from dataclasses import dataclass

MAX_ROWS = 64
MAX_WEIGHTS = 3
_BLOCK_K = 128


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """Tiles of `block_n` outputs by `block_k` inputs, `stages` of them in flight."""

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
    return LinearPlan(block_m, 32, _BLOCK_K, 4, 6)

"""How a launch is cut: tiles, splits and warps from shapes alone. Pure; nothing is tuned at run time."""

from __future__ import annotations

from dataclasses import dataclass

MAX_SPLITS = 64
PROGRAMS_PER_SM = 3
"""Decode programs that are resident at once; together they keep enough loads in flight to use the memory's bandwidth."""
SMALL_PROGRAMS_PER_SM = 4
"""The same with tiles of 32 cells, two in flight."""


@dataclass(frozen=True, slots=True)
class AttendPlan:
    """Tiles of `block_m` query rows and `block_n` cells; the cells of each tile's rows are shared by `splits` programs."""

    block_m: int
    block_n: int
    splits: int
    num_warps: int
    num_stages: int


def plan_attend(
    *, batch: int, kv_heads: int, group: int, count: int, head_dim: int, itemsize: int, capacity: int, num_sms: int
) -> AttendPlan:
    """Plan for `count` new tokens a row and at most `capacity` cells a row, on `num_sms` multiprocessors.

    Query rows of a (row, kv head) are its tokens times the `group` heads that share it; `itemsize` is the element's bytes. The host
    does not know the rows' lengths: every program takes its share of what its own row sees.
    """
    rows = count * group
    dim = next_power_of_two(head_dim)
    # The largest tiles whose sums stay in registers; float32 products run without tensor cores and need more of them.
    if itemsize == 4:
        most_rows, block_n = (32 if dim <= 64 else 16), (32 if dim <= 128 else 16)
    else:
        most_rows, block_n = (128, 64) if dim <= 128 else (64, 32)
    block_m = max(16, min(most_rows, next_power_of_two(rows)))
    if block_m == 128:
        block_n = 128  # measured on an H200: 341 TFLOP/s in prefill of 4096, 280 with tiles of 64 cells
    programs = batch * kv_heads * -(-rows // block_m)
    if itemsize == 2 and block_m == 16 and dim <= 128 and PROGRAMS_PER_SM * num_sms >= 2 * programs:
        # Decode of few rows, measured on an H200 at 2,048 cells: many short shares, 9.5 us instead of 11.8 for one row and 26.5
        # instead of 36.8 for eight.
        splits = max(1, min(SMALL_PROGRAMS_PER_SM * num_sms // programs, -(-capacity // 32), MAX_SPLITS))
        return AttendPlan(block_m, 32, splits, 4, 2)
    # A share below two tiles costs more to join than it saves.
    splits = max(1, min(PROGRAMS_PER_SM * num_sms // programs, -(-capacity // (2 * block_n)), MAX_SPLITS))
    # The compiler shares stages between page ids and the rows behind them: 5 keep two tiles in flight, 3 only one.
    stages = 2 if itemsize == 4 else 5 if block_m * dim <= 64 * 128 else 3
    warps = 8 if block_m == 128 or block_m * dim >= 64 * 256 else 4
    return AttendPlan(block_m, block_n, splits, warps, stages)


def next_power_of_two(size: int) -> int:
    """Smallest power of two that is at least `size` (which is at least 1)."""
    return 1 << (size - 1).bit_length()

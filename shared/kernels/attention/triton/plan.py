"""How a launch is cut: tiles, splits and warps from shapes alone. Pure; nothing is tuned at run time."""

from __future__ import annotations

from dataclasses import dataclass

DECODE_ROWS = 64
"""Up to here query rows (tokens x heads of a group) of a (row, kv head) are one tile and the cells are split over programs."""
MAX_SPLITS = 64


@dataclass(frozen=True, slots=True)
class AttendPlan:
    """Tile of `block_m` query rows and `block_n` cells, cells shared by `splits` programs."""

    block_m: int
    block_n: int
    splits: int
    num_warps: int
    num_stages: int


def plan_attend(
    *, batch: int, kv_heads: int, group: int, count: int, head_dim: int, itemsize: int, capacity: int, num_sms: int
) -> AttendPlan:
    """Plan for `count` new tokens a row, at most `capacity` cells a row, on `num_sms` multiprocessors.

    `itemsize` is the element's bytes. The host does not know the rows' lengths; every program takes its share of its own row's.
    """
    rows = count * group
    row_bytes = next_power_of_two(head_dim) * itemsize
    if rows > DECODE_ROWS:
        block_m = 128 if row_bytes <= 256 else 64
        block_n = 64 if row_bytes <= 256 else 32
        return AttendPlan(block_m, block_n, 1, num_warps=8 if block_m == 128 else 4, num_stages=3 if row_bytes <= 256 else 2)
    block_m = max(16, next_power_of_two(rows))
    block_n = 64 if row_bytes <= 256 else 32
    # Two programs a multiprocessor keep enough loads in flight; a share below two tiles costs more to join than it saves.
    wanted = 2 * num_sms // (batch * kv_heads)
    worth = -(-capacity // (2 * block_n))
    splits = max(1, min(wanted, worth, MAX_SPLITS))
    return AttendPlan(block_m, block_n, splits, num_warps=4, num_stages=3 if row_bytes <= 256 else 2)


def next_power_of_two(size: int) -> int:
    """Smallest power of two that is at least `size` (which is at least 1)."""
    return 1 << (size - 1).bit_length()

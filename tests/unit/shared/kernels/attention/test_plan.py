"""How launches are cut, from shapes alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.kernels.attention.triton.plan import MAX_SPLITS, AttendPlan, next_power_of_two, plan_attend

H200 = 132


def plan(**changes: int) -> AttendPlan:
    shape = {"batch": 32, "kv_heads": 8, "group": 4, "count": 1, "head_dim": 128, "itemsize": 2, "capacity": 4096, "num_sms": H200}
    return plan_attend(**(shape | changes))


@given(
    batch=st.integers(1, 256),
    kv_heads=st.integers(1, 64),
    group=st.integers(1, 16),
    count=st.integers(1, 8192),
    head_dim=st.integers(16, 256),
    itemsize=st.sampled_from((2, 4)),
    capacity=st.integers(1, 10**6),
    num_sms=st.integers(1, 200),
)
def test_tiles_are_legal_and_splits_never_crowd(
    batch: int, kv_heads: int, group: int, count: int, head_dim: int, itemsize: int, capacity: int, num_sms: int
) -> None:
    got = plan_attend(
        batch=batch,
        kv_heads=kv_heads,
        group=group,
        count=count,
        head_dim=head_dim,
        itemsize=itemsize,
        capacity=capacity,
        num_sms=num_sms,
    )
    assert got.block_m >= 16  # the smallest matrix product
    assert got.block_n >= 16
    assert got.block_m == next_power_of_two(got.block_m)
    assert 1 <= got.splits <= MAX_SPLITS
    programs = batch * kv_heads * -(-count * group // got.block_m)
    assert got.splits == 1 or programs * got.splits <= 4 * num_sms
    assert (got.splits - 1) * got.block_n < capacity
    # Tiles of keys and values in flight fit the shared memory of one multiprocessor (227 KiB).
    assert got.num_stages // 2 * 2 * got.block_n * next_power_of_two(head_dim) * itemsize <= 128 << 10


def test_one_row_of_a_long_context_uses_every_multiprocessor() -> None:
    assert plan(batch=1, capacity=32768).splits * 8 > 2 * H200


def test_a_batch_that_fills_the_device_is_not_split() -> None:
    assert plan(batch=64).splits == 1


def test_no_share_of_a_short_context_is_without_a_tile() -> None:
    short = plan(batch=1, capacity=256)
    assert short.splits * short.block_n <= 256


def test_wide_elements_are_not_split_below_two_tiles() -> None:
    short = plan(batch=1, capacity=256, itemsize=4)
    assert short.splits * 2 * short.block_n <= 256


def test_a_long_prompt_takes_tall_tiles_and_a_decode_step_the_lowest() -> None:
    assert plan(batch=1, count=4096).block_m == 128
    assert plan(count=1).block_m == 16


def test_next_power_of_two() -> None:
    assert [next_power_of_two(size) for size in (1, 2, 3, 64, 65, 96)] == [1, 2, 4, 64, 128, 128]

"""Which products of few rows are ours on a GPU, and how they are cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.kernels.linear.triton.plan import LinearPlan, plan_linears


@given(
    rows=st.integers(0, 4096),
    outputs=st.integers(1, 200_000),
    inputs=st.integers(1, 20_000),
    weights=st.integers(1, 5),
    itemsize=st.sampled_from((2, 4, 8)),
)
def test_a_plan_covers_the_rows_and_fits_a_multiprocessor(
    rows: int, outputs: int, inputs: int, weights: int, itemsize: int
) -> None:
    plan = plan_linears(rows=rows, outputs=outputs, inputs=inputs, weights=weights, itemsize=itemsize)
    if plan is None:
        return
    assert (rows > 0, itemsize, inputs % plan.block_k) == (True, 2, 0), "no load of weights is masked"
    assert rows <= plan.block_m
    assert weights <= 3
    assert plan.stages * (plan.block_n + plan.block_m) * plan.block_k * 2 <= 227 << 10


def test_the_librarys_cases_are_left_to_it() -> None:
    down = {"outputs": 4096, "inputs": 14336, "weights": 1, "itemsize": 2}
    assert plan_linears(rows=1, **down) is None
    assert plan_linears(rows=65, **(down | {"outputs": 28672})) is None
    assert plan_linears(rows=1, outputs=6144, inputs=4096, weights=3, itemsize=4) is None
    assert plan_linears(rows=1, outputs=6144, inputs=4096, weights=3, itemsize=2) == LinearPlan(16, 64, 128, 4, 4)

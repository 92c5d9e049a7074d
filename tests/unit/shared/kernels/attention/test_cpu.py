"""The CPU's ops against the specification: values, the whole pool, what they never read and what they refuse."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shared.kernels.attention import ops, reference
from tests.support.attention.cases import CAPACITY, HEAD_DIMS, TOLERANCE, Case, Inputs, bits, catalogue, make
from tests.support.attention.refusals import REFUSED

ops.load_ops()


def assert_equals_reference(case: Case, seed: int = 0) -> None:
    """Both ops: output and strides, and every byte of the pool's storage."""
    inputs = make(case, seed)
    expected = inputs.copy()
    out = torch.ops.quire.paged_attend(*inputs.paged_arguments())
    want = reference.paged_attend(*expected.paged_arguments())
    assert torch.equal(bits(inputs.storage), bits(expected.storage))
    assert out.stride() == want.stride()
    torch.testing.assert_close(out, want, **TOLERANCE[case.dtype])
    linear = torch.ops.quire.attend(inputs.q, *inputs.caches(), inputs.start, *inputs.options)
    assert linear.stride() == want.stride()
    torch.testing.assert_close(linear, want, **TOLERANCE[case.dtype])


def test_this_host_runs_the_compiled_kernels() -> None:
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler on this host")
    assert ops.implementation() is ops.Implementation.CPP


@pytest.mark.parametrize("case", catalogue(), ids=str)
def test_equals_reference(case: Case) -> None:
    """With NaN in every cell, page and table tail that no query may see (BR-020, BR-063), at padded strides (BR-065)."""
    assert_equals_reference(case)


@st.composite
def any_case(draw: st.DrawFn) -> Case:
    count = draw(st.sampled_from((1, 2, 4, 5, 17, 70)))
    linear = draw(st.booleans())
    return Case(
        dtype=draw(st.sampled_from(list(TOLERANCE))),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 9)),
        count=count,
        dim=draw(st.sampled_from((*HEAD_DIMS, 8, 40, 72))),
        page_size=CAPACITY if linear else draw(st.sampled_from((1, 3, 16, 32, 64))),
        page_dim=int(linear),
        starts=tuple(draw(st.lists(st.integers(0, CAPACITY - count), min_size=1, max_size=4))),
        window=draw(st.none() | st.integers(1, CAPACITY + 5)),
        softcap=draw(st.none() | st.sampled_from((0.5, 30.0))),
        sinks=draw(st.booleans()),
        padding=draw(st.sampled_from((0, 16))),
    )


@settings(max_examples=60, deadline=None)
@given(case=any_case(), threads=st.integers(1, 5))
def test_equals_reference_on_any_shape(case: Case, threads: int) -> None:
    """More threads cut the same cells into more shares."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_equals_reference(case)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_one_long_row_is_shared_by_all_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_equals_reference(Case(starts=(2900,), capacity=3000, page_size=32, count=2, dim=128, kv_heads=1, sinks=True))
        assert_equals_reference(Case(starts=(1900, 3, 700), capacity=2000, page_size=32, dim=128, window=900))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize("window", [4, 40])
def test_window_counts_the_query_itself(count: int, window: int) -> None:
    """BR-078: a key just inside the window changes the output, one just outside does not."""
    case = Case(count=count, starts=(60,), window=window, group=1, kv_heads=1, page_size=96, page_dim=1)
    inputs = make(case)
    base = torch.ops.quire.paged_attend(*inputs.copy().paged_arguments())
    for outermost, changes in ((60 + 1 - window, True), (60 - window, False)):
        poked = inputs.copy()
        poked.pool[:, :, :, outermost] += 3.0
        out = torch.ops.quire.paged_attend(*poked.paged_arguments())
        assert torch.equal(out[:, :, 0], base[:, :, 0]) is not changes
        assert torch.equal(out[:, :, 1:], base[:, :, 1:])


def test_extreme_scores_stay_finite() -> None:
    """Scores of +-30,000 in every block, sinks far above and far below them."""
    for sink in (-1e30, 1e5):
        inputs = make(Case(count=40, sinks=True, starts=(50, 0)))
        inputs.q.mul_(1e4)
        assert inputs.sinks is not None
        inputs.sinks.fill_(sink)
        want = reference.paged_attend(*inputs.copy().paged_arguments())
        for count in (40, 1):
            out = torch.ops.quire.attend(
                inputs.q[:, :, -count:], *filled_caches(inputs), inputs.start + 40 - count, *inputs.options
            )
            torch.testing.assert_close(out, want[:, :, -count:], rtol=1e-4, atol=1e-4)


def filled_caches(inputs: Inputs) -> tuple[Tensor, Tensor]:
    written = inputs.copy()
    reference.paged_attend(*written.paged_arguments())
    return written.caches()


def test_rows_of_a_padded_batch_share_the_dump_page() -> None:
    """Rows without a sequence write page 0 at once; the real row does not notice, and only page 0 and its own cells change."""
    case = Case(starts=(37, 0, 0, 0))
    inputs = make(case)
    inputs.table[1:] = 0
    alone = make(case)
    want = reference.paged_attend(
        alone.q[:1], alone.k[:1], alone.v[:1], alone.pool, alone.table[:1], alone.start[:1], 0, *alone.options
    )
    out = torch.ops.quire.paged_attend(*inputs.paged_arguments())
    torch.testing.assert_close(out[:1], want, **TOLERANCE[case.dtype])
    assert torch.equal(bits(inputs.pool[1:]), bits(alone.pool[1:]))


def test_pages_before_the_window_may_be_unmapped() -> None:
    case = Case(starts=(90,), window=20)
    inputs, want = make(case), reference.paged_attend(*make(case).paged_arguments())
    inputs.table[0, :4] = -1
    torch.testing.assert_close(torch.ops.quire.paged_attend(*inputs.paged_arguments()), want)


def test_empty_batch() -> None:
    inputs = make(Case(starts=(5,)))
    q, k, v = inputs.q[:0], inputs.k[:0], inputs.v[:0]
    out = torch.ops.quire.paged_attend(q, k, v, inputs.pool, inputs.table[:0], inputs.start[:0], 0, *inputs.options)
    assert out.shape == (0, *inputs.q.shape[1:])


@pytest.mark.parametrize("message", REFUSED)
def test_refused_arguments_leave_the_pool_untouched(message: str) -> None:
    """The compiled op itself refuses, as a normal exception that names the argument."""
    inputs = make(Case(count=2))
    before = inputs.storage.clone()
    name = re.escape(message.split(":", maxsplit=1)[0])
    with pytest.raises(ValueError, match=f"{name}: expected .*got"):
        torch.ops.quire.paged_attend(**REFUSED[message](inputs))
    assert torch.equal(bits(inputs.storage), bits(before))


def test_attend_refuses_what_does_not_fit() -> None:
    inputs = make(Case(count=2))
    keys, values = inputs.caches()
    for arguments, name in [
        ((inputs.q, keys[0], values, inputs.start), "k_cache"),
        ((inputs.q, keys, values[:, :, :5], inputs.start), "v_cache"),
        ((inputs.q, keys, values.half(), inputs.start), "v_cache"),
        ((inputs.q, keys.mT.contiguous().mT, values, inputs.start), "k_cache"),
        ((inputs.q, keys, values, inputs.start + 10), r"start\[2\]"),
    ]:
        with pytest.raises(ValueError, match=f"{name}: expected .* got"):
            torch.ops.quire.attend(*arguments, *inputs.options)

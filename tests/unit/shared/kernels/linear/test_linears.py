"""`quire::linears` against float64, over every path of the kernel: row groups, tiles, tails, dtypes, strides."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from shared.kernels.linear.ops import load_ops, reference


@pytest.fixture(scope="module", autouse=True)
def ops() -> None:
    load_ops()


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(x: Tensor, weights: list[Tensor]) -> None:
    """Against the product in float64, to within the rounding of one result and of float32 sums."""
    got = torch.ops.quire.linears(x, weights)
    assert len(got) == len(weights)
    for y, w in zip(got, weights, strict=True):
        wanted = x.double() @ w.double().t()
        assert y.dtype is x.dtype
        assert y.shape == wanted.shape
        assert y.is_contiguous()
        tolerance = {"rtol": 1e-5, "atol": 1e-4} if x.dtype is torch.float32 else {"rtol": 2**-8, "atol": 1e-4}
        torch.testing.assert_close(y.double(), wanted, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", range(1, 10))
def test_every_count_of_rows_tiles_and_tails(rows: int, dtype: torch.dtype) -> None:
    """Widths around a vector step, outputs around a tile: 1 to 9 rows take every group size, and one more than the kernel does."""
    for width, outputs in itertools.product((1, 7, 16, 31, 32, 100), (1, 3, 4, 11, 12, 13, 25)):
        x = random(rows, width, seed=rows, dtype=dtype)
        check(x, [random(outputs, width, seed=width, dtype=dtype), random(outputs + 1, width, seed=outputs, dtype=dtype)])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_split_over_threads_changes_nothing(threads: int) -> None:
    """Large enough for several threads, with a tile that spans no weight's end: bit for bit the same."""
    x, weights = random(3, 576, seed=1), [random(count, 576, seed=count) for count in (576, 191, 193)]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = torch.ops.quire.linears(x, weights)
    torch.set_num_threads(threads)
    try:
        together = torch.ops.quire.linears(x, weights)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """A sequence answers alike alone and in a batch: each row's sums run over the same elements in the same order."""
    x, weight = random(8, 100, seed=2), random(50, 100, seed=3)
    (together,) = torch.ops.quire.linears(x, [weight])
    for count in (1, 2, 3, 4, 5):
        (some,) = torch.ops.quire.linears(x[:count], [weight])
        assert torch.equal(some, together[:count])


def test_leading_axes_are_kept_and_strides_honoured() -> None:
    x = random(40, 2, 3, seed=4).permute(1, 2, 0)
    wide = random(20, 80, seed=5)
    check(x, [wide[:, 40:], wide[:, ::2], random(40, 9, seed=6).t()])


def test_many_rows_and_other_dtypes_take_the_library() -> None:
    check(random(2, 30, 16, seed=7), [random(5, 16, seed=8)])
    x, weight = random(3, 16, seed=9).double(), random(5, 16, seed=10).double()
    assert torch.equal(torch.ops.quire.linears(x, [weight])[0], reference(x, [weight])[0])
    empty = torch.ops.quire.linears(random(0, 16, seed=11), [random(5, 16, seed=12)])[0]
    assert empty.shape == (0, 5)


@pytest.mark.parametrize(
    ("x", "weights", "match"),
    [
        (torch.zeros(2, 4), [torch.zeros(3, 5)], r"expected \[out, 4\]"),
        (torch.zeros(2, 4), [torch.zeros(3, 4), torch.zeros(3, 4, dtype=torch.bfloat16)], "BFloat16"),
        (torch.zeros(2, 4), [torch.zeros(4)], r"got \[4\]"),
        (torch.zeros(()), [torch.zeros(3, 4)], "at least one axis"),
        (torch.zeros(2, 4), [], "at least one"),
    ],
)
def test_operands_that_do_not_fit_are_refused(x: Tensor, weights: list[Tensor], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        torch.ops.quire.linears(x, weights)


def test_shapes_are_known_without_computing() -> None:
    """Export sees the shapes and types the kernel makes."""
    torch.library.opcheck(
        torch.ops.quire.linears.default, (random(2, 3, 16, seed=1), [random(5, 16, seed=2), random(7, 16, seed=3)])
    )

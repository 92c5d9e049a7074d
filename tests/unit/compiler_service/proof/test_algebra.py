"""The index algebra against numpy: every operation, on grids whose opaque terms are arrays we know."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from compiler_service.proof import algebra
from compiler_service.proof.algebra import ONE, ZERO, Coord, Grid, Linear, Term, constant

Array = NDArray[np.int64]
checked = settings(deadline=None, max_examples=60)
ARRAYS = {
    "s": np.array(7),
    "v": np.array([11, 3, 19, 4]),
    "m": np.arange(12).reshape(3, 4) ** 2,
}


def number(linear: Linear, at: tuple[int, ...]) -> int:
    total = linear.const
    for term, factor in linear.terms:
        place = tuple(number(c.offset, at) + (0 if c.axis is None else at[c.axis]) for c in term.index)
        total += factor * int(ARRAYS[term.source][place])
    return total


def array(value: Grid) -> Array:
    """Every element by the definition of a grid."""
    shape = [size.const for size in value.shape]
    result = np.zeros(shape, dtype=np.int64)
    for at in np.ndindex(*shape):
        result[at] = number(value.base, at) + sum(step * i for step, i in zip(value.steps, at, strict=True))
    return result


def sizes(*shape: int) -> list[Linear]:
    return [constant(size) for size in shape]


def opaque(name: str) -> Grid:
    return algebra.opaque(name, sizes(*ARRAYS[name].shape))


def counting(*shape: int) -> Grid:
    """0, 1, 2, .. along the last axis, the same along the others."""
    found = algebra.broadcast(algebra.iota(constant(shape[-1]), ZERO, 1), sizes(*shape))
    assert found is not None
    return found


@st.composite
def grids(draw: st.DrawFn, max_rank: int = 3) -> Grid:
    """A grid of sizes 1 to 4: counts with steps, plus opaque arrays where the shape allows."""
    shape = draw(st.sampled_from([(), (4,), (1,), (3, 4), (3, 1), (1, 4), (2, 3, 4), (2, 1, 4)][: 4 + 2 * max_rank]))
    steps = [draw(st.integers(-2, 2)) for _ in shape]
    value = algebra.grid(sizes(*shape), steps, constant(draw(st.integers(-5, 5))))
    for name in draw(st.sets(st.sampled_from(sorted(ARRAYS)))):
        term = algebra.broadcast(opaque(name), value.shape)
        if term is not None:
            grown = algebra.add(value, term, draw(st.sampled_from((1, -1, 3))))
            assert grown is not None
            value = grown
    return value


def same(found: Grid | None, expected: Array) -> bool:
    """Either no answer, or the right one: the algebra may give up, never err."""
    return found is None or (array(found).shape == expected.shape and bool((array(found) == expected).all()))


@checked
@given(grids(), grids(), st.integers(-3, 3))
def test_add(left: Grid, right: Grid, alpha: int) -> None:
    try:
        expected = array(left) + alpha * array(right)
    except ValueError:
        assert algebra.add(left, right, alpha) is None
        return
    found = algebra.add(left, right, alpha)
    assert found is not None
    assert same(found, expected)


@checked
@given(grids(), st.integers(-3, 3))
def test_scale(value: Grid, factor: int) -> None:
    assert same(algebra.scale(value, factor), array(value) * factor)


@checked
@given(grids(), st.data())
def test_views(value: Grid, data: st.DataObject) -> None:
    rank = value.rank
    axis = data.draw(st.integers(0, rank))
    assert same(algebra.insert_axis(value, axis), np.expand_dims(array(value), axis))
    order = data.draw(st.permutations(range(rank)))
    assert same(algebra.permute(value, order), array(value).transpose(order))
    wide = (2, *(size.const for size in value.shape))
    assert same(algebra.broadcast(value, sizes(*wide)), np.broadcast_to(array(value), wide))
    new = data.draw(st.sampled_from(_factorings(array(value).size)))
    assert same(algebra.reshape(value, sizes(*new)), array(value).reshape(new))


def _factorings(total: int) -> list[tuple[int, ...]]:
    small = range(1, total + 1)
    return [shape for rank in (1, 2, 3) for shape in itertools.product(small, repeat=rank) if np.prod(shape) == total][:40]


@checked
@given(grids().filter(lambda value: value.rank > 0), st.data())
def test_parts(value: Grid, data: st.DataObject) -> None:
    axis = data.draw(st.integers(0, value.rank - 1))
    size = value.shape[axis].const
    index = data.draw(st.integers(0, size - 1))
    assert same(algebra.select(value, axis, constant(index)), np.take(array(value), index, axis))
    step = data.draw(st.integers(1, 3))
    part = array(value)[(slice(None),) * axis + (slice(index, None, step),)]
    assert same(algebra.take(value, axis, constant(index), step, constant(part.shape[axis])), part)
    assert same(algebra.flip(value, axis), np.flip(array(value), axis))
    assert same(algebra.cumsum(value, axis), np.cumsum(array(value), axis))


@checked
@given(grids().filter(lambda value: value.rank > 0), st.data())
def test_concatenate(value: Grid, data: st.DataObject) -> None:
    """Cutting and joining gives the value back; joining with a gap is not taken for a run."""
    axis = data.draw(st.integers(0, value.rank - 1))
    size = value.shape[axis].const
    cut = data.draw(st.integers(0, size))
    head = algebra.take(value, axis, ZERO, 1, constant(cut))
    tail = algebra.take(value, axis, constant(cut), 1, constant(size - cut))
    assert head is not None
    assert tail is not None
    assert same(algebra.concatenate([head, tail], axis), array(value))
    assert same(algebra.concatenate([tail, head], axis), np.concatenate([array(tail), array(head)], axis))
    moved = algebra.add(tail, algebra.uniform(ONE))
    assert moved is not None
    assert same(algebra.concatenate([head, moved], axis), np.concatenate([array(head), array(moved)], axis))


@checked
@given(st.lists(st.integers(-4, 9), min_size=12, max_size=12), st.sampled_from([(12,), (3, 4), (2, 3, 2), (12, 1)]))
def test_fill_reads_exactly_the_constants_that_are_grids(values: list[int], shape: tuple[int, ...]) -> None:
    found = algebra.fill(values, shape)
    assert same(found, np.array(values).reshape(shape))


@checked
@given(
    st.sampled_from([(12,), (3, 4), (2, 3, 2), (1, 5)]), st.lists(st.integers(-2, 2), min_size=3, max_size=3), st.integers(-5, 5)
)
def test_fill_reads_every_grid_of_numbers(shape: tuple[int, ...], steps: list[int], base: int) -> None:
    value = algebra.grid(sizes(*shape), steps[: len(shape)], constant(base))
    assert algebra.fill(array(value).reshape(-1).tolist(), shape) == value


def test_operations_that_must_not_give_up() -> None:
    run = algebra.add(algebra.insert_axis(opaque("v"), 1), counting(6))
    assert run is not None
    assert (run.shape, run.steps) == (tuple(sizes(4, 6)), (0, 1))
    assert algebra.flip(counting(5), 0) == algebra.grid(sizes(5), [-1], constant(4))
    assert algebra.reshape(counting(1, 5), sizes(5)) == counting(5)
    assert algebra.cumsum(algebra.uniform(ONE, sizes(5)), 0) == algebra.iota(constant(5), ONE, 1)
    assert algebra.concatenate([counting(3), algebra.iota(constant(2), constant(3), 1)], 0) == counting(5)


def test_equal_values_are_equal_grids() -> None:
    p, q = opaque("s"), opaque("v")
    one_way = algebra.add(counting(4), algebra.add(p, q) or p)
    other_way = algebra.add(algebra.add(q, counting(4)) or p, p)
    assert one_way == other_way
    assert algebra.add(one_way or p, q, -1) == algebra.add(counting(4), p)


def test_symbolic_sizes_only_broadcast_where_they_are_certain() -> None:
    n, m = algebra.symbol("n", nonnegative=True), algebra.symbol("m", nonnegative=True)
    count = algebra.iota(n, ZERO, 1)
    assert algebra.add(count, algebra.opaque("v", [m])) is None  # m may be 1, and may be n: nothing is certain
    assert algebra.add(count, algebra.opaque("v", [ONE])) == algebra.grid([n], [1], _element("v"))
    assert algebra.broadcast(count, [m]) is None


def _element(name: str) -> Linear:
    return Linear(0, ((Term(name, (Coord(None, ZERO),)), 1),))


def test_a_start_may_follow_one_axis_only() -> None:
    rows = algebra.add(algebra.insert_axis(opaque("v"), 1), counting(6))
    assert rows is not None
    assert algebra.per_row(rows, 0) is None
    start = algebra.per_row(algebra.select(rows, 1, ZERO), 0)
    assert str(start) == "v[row]"
    assert str(algebra.per_row(algebra.iota(constant(3), ONE, 4), 0)) == "4*row + 1"
    assert algebra.per_row(algebra.uniform(ONE), None) == ONE


@pytest.mark.parametrize(
    ("linear", "text"),
    [
        (lambda p: ZERO, "0"),
        (lambda p: p, "p"),
        (lambda p: p.scaled(-1), "-p"),
        (lambda p: p.scaled(2) - constant(3), "2*p - 3"),
        (lambda p: p - algebra.symbol("q", nonnegative=False), "p - q"),
    ],
)
def test_linears_read_as_formulas(linear: Callable[[Linear], Linear], text: str) -> None:
    assert str(linear(algebra.symbol("p", nonnegative=False))) == text

"""Affine integer tensors: what an index expression is, as far as a contiguity proof needs to know.

A `Grid` describes every element of an integer tensor by its coordinates:

    value[i0, i1, ..] = base + steps[0] * i0 + steps[1] * i1 + ..

where `base` is a `Linear`: an integer plus integer multiples of opaque terms. A term is a value nobody looks into: a size
symbol of the program, or one element of a tensor, `p[coord0, coord1, ..]`, whose coordinates may follow axes of the grid. So
`start[:, None] + arange(n)` is shape `(B, n)`, steps `(0, 1)`, base `start[axis 0]`: a run along axis 1 with a start for each row.

Two grids are the same tensor when they are equal, because a term names one value of a functional graph. Sums, differences,
multiples by an integer, views and slices stay inside the algebra; whatever leaves it becomes a new opaque term. Arithmetic is
modulo the integer width, which changes nothing for cells inside a cache.

This module knows neither tensors nor operator names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Coord:
    """One coordinate of an opaque tensor: `offset`, plus the coordinate along `axis` if there is one (axis 0 prints as `row`)."""

    axis: int | None
    offset: Linear

    def __str__(self) -> str:
        if self.axis is None:
            return str(self.offset)
        name = "row" if self.axis == 0 else f"i{self.axis}"
        return name if self.offset == ZERO else f"{name}+{self.offset}"


@dataclass(frozen=True, slots=True)
class Term:
    """An opaque integer: element `index` of the tensor `source`, or the size symbol `source` (then `symbol` is set).

    `given` says that the program's caller chooses it, freely: an input or a size.
    """

    source: str
    index: tuple[Coord, ...] = ()
    symbol: bool = False
    nonnegative: bool = False
    given: bool = False

    def __str__(self) -> str:
        shown = self.index and self.source != ROW
        return self.source + (f"[{','.join(map(str, self.index))}]" if shown else "")

    def varies_along(self, axis: int) -> bool:
        return any(coord.axis == axis for coord in self.index)


@dataclass(frozen=True, slots=True)
class Linear:
    """`const + sum(coefficient * term)`, terms sorted and never with coefficient 0, so that equality is equality of values."""

    const: int
    terms: tuple[tuple[Term, int], ...] = ()

    @staticmethod
    def of(const: int, terms: Iterable[tuple[Term, int]]) -> Linear:
        total: dict[Term, int] = {}
        for term, factor in terms:
            total[term] = total.get(term, 0) + factor
        kept = [(term, factor) for term, factor in total.items() if factor]
        if len(kept) > 1:
            kept.sort(key=lambda pair: (str(pair[0]), pair[0].symbol))
        return Linear(const, tuple(kept))

    def __add__(self, other: Linear) -> Linear:
        return Linear.of(self.const + other.const, self.terms + other.terms)

    def __sub__(self, other: Linear) -> Linear:
        return self + other.scaled(-1)

    def scaled(self, factor: int) -> Linear:
        return Linear.of(self.const * factor, ((term, f * factor) for term, f in self.terms))

    @property
    def is_constant(self) -> bool:
        return not self.terms

    @property
    def is_given(self) -> bool:
        """Whether the caller can give it any value: nothing in it was computed out of sight."""
        return all(term.given for term, _ in self.terms)

    @property
    def is_nonnegative(self) -> bool:
        """Whether the value is provably at least 0 (sizes are)."""
        return self.const >= 0 and all(term.nonnegative and factor > 0 for term, factor in self.terms)

    def varies_along(self, axis: int) -> bool:
        return any(term.varies_along(axis) for term, _ in self.terms)

    def with_coords(self, move: Callable[[Coord], Coord]) -> Linear:
        """The same value with every coordinate of its terms rewritten by `move`."""
        return Linear.of(self.const, ((replace(term, index=tuple(map(move, term.index))), factor) for term, factor in self.terms))

    def __str__(self) -> str:
        parts = [f"{'' if factor == 1 else '-' if factor == -1 else f'{factor}*'}{term}" for term, factor in self.terms]
        if self.const or not parts:
            parts.append(str(self.const))
        return " + ".join(parts).replace("+ -", "- ")


ZERO = Linear(0)
ONE = Linear(1)
ROW = "row"
"""Source of the term that is the number of the row itself."""


def constant(value: int) -> Linear:
    return Linear(value)


def symbol(name: str, *, nonnegative: bool = False, given: bool = False) -> Linear:
    """A size symbol, or another scalar of the program that is not an element of a tensor."""
    return Linear(0, ((Term(name, symbol=True, nonnegative=nonnegative, given=given), 1),))


@dataclass(frozen=True, slots=True)
class Grid:
    """See the module's docstring. Axes of static size 1 or 0 have step 0 and no coordinate: 0 is the only one there could be."""

    shape: tuple[Linear, ...]
    steps: tuple[int, ...]
    base: Linear

    @property
    def rank(self) -> int:
        return len(self.shape)

    def varies_along(self, axis: int) -> bool:
        return self.steps[axis] != 0 or self.base.varies_along(axis)

    @property
    def varying_axes(self) -> tuple[int, ...]:
        return tuple(axis for axis in range(self.rank) if self.varies_along(axis))


def is_single(size: Linear) -> bool:
    """Whether an axis has at most one coordinate, whatever the sizes of the program are."""
    return size.is_constant and size.const <= 1


def grid(shape: Sequence[Linear], steps: Sequence[int], base: Linear) -> Grid:
    """A Grid in normal form."""
    single = [is_single(size) for size in shape]
    if any(single):
        steps = [0 if one else step for one, step in zip(single, steps, strict=True)]
        base = base.with_coords(lambda c: Coord(None, c.offset) if c.axis is not None and single[c.axis] else c)
    return Grid(tuple(shape), tuple(steps), base)


def uniform(value: Linear, shape: Sequence[Linear] = ()) -> Grid:
    """Every element is `value`."""
    return grid(shape, [0] * len(shape), value)


def iota(length: Linear, start: Linear, step: int) -> Grid:
    return grid([length], [step], start)


def opaque(source: str, shape: Sequence[Linear], *, given: bool = False) -> Grid:
    """A tensor of which nothing is known but its shape and its name."""
    index = tuple(Coord(axis, ZERO) for axis in range(len(shape)))
    return grid(shape, [0] * len(shape), Linear(0, ((Term(source, index, given=given), 1),)))


def fill(values: Sequence[int], shape: Sequence[int]) -> Grid | None:
    """The grid with exactly these row-major `values`, if there is one: a constant read by value."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    if not values:
        return grid([constant(size) for size in shape], [0] * len(shape), ZERO)
    steps = [values[stride] - values[0] if size > 1 else 0 for stride, size in zip(strides, shape, strict=True)]
    expected = [values[0]]
    for step, size in zip(steps, shape, strict=True):
        expected = [value + step * coord for value in expected for coord in range(size)]
    if expected != list(values):
        return None
    return grid([constant(size) for size in shape], steps, constant(values[0]))


def remap(value: Grid, shape: Sequence[Linear], axis_of: Mapping[int, int]) -> Grid:
    """`value` with its axis `a` at `axis_of[a]` of a tensor of `shape`; the other new axes are uniform, dropped ones were."""
    steps = [0] * len(shape)
    for old, new in axis_of.items():
        steps[new] = value.steps[old]
    return grid(shape, steps, value.base.with_coords(lambda c: c if c.axis is None else replace(c, axis=axis_of[c.axis])))


def broadcast(value: Grid, shape: Sequence[Linear]) -> Grid | None:
    """`value` repeated to `shape` by the usual rules (right aligned, only axes of static size 1 stretch)."""
    shift = len(shape) - value.rank
    if shift < 0 or any(size not in (ONE, shape[axis + shift]) for axis, size in enumerate(value.shape)):
        return None
    return remap(value, shape, _to_the_right(value, shape))


def common_shape(left: Sequence[Linear], right: Sequence[Linear]) -> tuple[Linear, ...] | None:
    """The shape two operands broadcast to; None where that is not certain."""
    rank = max(len(left), len(right))
    pairs = zip([ONE] * (rank - len(left)) + list(left), [ONE] * (rank - len(right)) + list(right), strict=True)
    shape = []
    for one, other in pairs:
        if one != other and ONE not in (one, other):
            return None
        shape.append(other if one == ONE else one)
    return tuple(shape)


def add(left: Grid, right: Grid, alpha: int = 1) -> Grid | None:
    """`left + alpha * right`, broadcast."""
    shape = common_shape(left.shape, right.shape)
    if shape is None:
        return None
    a, b = remap(left, shape, _to_the_right(left, shape)), remap(right, shape, _to_the_right(right, shape))
    return grid(shape, [x + alpha * y for x, y in zip(a.steps, b.steps, strict=True)], a.base + b.base.scaled(alpha))


def scale(value: Grid, factor: int) -> Grid:
    return grid(value.shape, [step * factor for step in value.steps], value.base.scaled(factor))


def permute(value: Grid, order: Sequence[int]) -> Grid:
    """Axis `k` of the result is axis `order[k]` of `value`."""
    return remap(value, [value.shape[axis] for axis in order], {old: new for new, old in enumerate(order)})


def insert_axis(value: Grid, axis: int) -> Grid:
    shape = [*value.shape[:axis], ONE, *value.shape[axis:]]
    return remap(value, shape, {old: old + (old >= axis) for old in range(value.rank)})


def take(value: Grid, axis: int, offset: Linear, step: int, length: Linear) -> Grid | None:
    """`value[.., offset + step * i, ..]` for `i` in `0..length` along `axis`; None for a stepped slice of an opaque tensor."""
    if step != 1 and value.base.varies_along(axis):
        return None
    base = value.base.with_coords(lambda c: Coord(axis, c.offset + offset) if c.axis == axis else c)
    steps = list(value.steps)
    base = base + offset.scaled(steps[axis])
    steps[axis] *= step
    return grid([*value.shape[:axis], length, *value.shape[axis + 1 :]], steps, base)


def select(value: Grid, axis: int, index: Linear) -> Grid:
    """`value[.., index, ..]`: `axis` goes away."""

    def move(c: Coord) -> Coord:
        if c.axis is None or c.axis < axis:
            return c
        return Coord(None, c.offset + index) if c.axis == axis else replace(c, axis=c.axis - 1)

    base = value.base.with_coords(move) + index.scaled(value.steps[axis])
    return grid(_without(value.shape, axis), _without(value.steps, axis), base)


def flip(value: Grid, axis: int) -> Grid | None:
    if value.base.varies_along(axis):
        return None
    last = value.shape[axis] - ONE
    steps = list(value.steps)
    base = value.base + last.scaled(steps[axis])
    steps[axis] = -steps[axis]
    return grid(value.shape, steps, base)


def reshape(value: Grid, shape: Sequence[Linear]) -> Grid | None:
    """The same elements in row-major order under another shape, where axes of size 1 come and go or nothing varies."""
    if not value.varying_axes:
        return uniform(value.base, shape)
    old = [axis for axis, size in enumerate(value.shape) if size != ONE]
    new = [axis for axis, size in enumerate(shape) if size != ONE]
    if [value.shape[axis] for axis in old] != [shape[axis] for axis in new]:
        return None
    return remap(value, shape, dict(zip(old, new, strict=True)))


def per_row(value: Grid, row: int | None) -> Linear | None:
    """A value that changes along axis `row` alone (None: along none), as a Linear whose terms have their row on axis 0."""
    if any(axis != row for axis in value.varying_axes):
        return None
    base = value.base.with_coords(lambda c: Coord(0, c.offset) if c.axis is not None else c)
    step = 0 if row is None else value.steps[row]
    return base + Linear.of(0, [(Term(ROW, (Coord(0, ZERO),), given=True), step)])


def cumsum(value: Grid, axis: int) -> Grid | None:
    """Running sum of a constant: `c, 2c, 3c, ..`."""
    if value.varying_axes or not value.base.is_constant:
        return None
    steps = [0] * value.rank
    steps[axis] = value.base.const
    return grid(value.shape, steps, value.base)


def concatenate(parts: Sequence[Grid], axis: int) -> Grid | None:
    """Parts end to end along `axis`, where each goes on exactly as the one before it stopped."""
    first, total = parts[0], parts[0].shape[axis]
    step = next((part.steps[axis] for part in parts if not is_single(part.shape[axis])), None)
    if step is None:  # single cells: the distance between the first two is the step, if it is a number
        gap = parts[1].base - first.base if len(parts) > 1 else ZERO
        if not gap.is_constant:
            return None
        step = gap.const
    for part in parts:
        others_differ = _without(part.steps, axis) != _without(first.steps, axis)
        wrong_step = not is_single(part.shape[axis]) and part.steps[axis] != step
        if others_differ or wrong_step or part.base.varies_along(axis):
            return None
        if part is not first:
            if part.base != first.base + total.scaled(step):
                return None
            total = total + part.shape[axis]
    steps = list(first.steps)
    steps[axis] = step
    return grid([*first.shape[:axis], total, *first.shape[axis + 1 :]], steps, first.base)


def choose(condition: Grid, left: Grid, right: Grid, source: str, shape: Sequence[Linear]) -> Grid | None:
    """`where(condition, left, right)` when both arms take the same steps: they differ by an opaque base, called `source`."""
    a, b, c = broadcast(left, shape), broadcast(right, shape), broadcast(condition, shape)
    if not a or not b or not c or a.steps != b.steps:
        return None
    if a.base == b.base:
        return a
    index = tuple(
        Coord(axis, ZERO)
        for axis in range(len(shape))
        if c.varies_along(axis) or a.base.varies_along(axis) or b.base.varies_along(axis)
    )
    return grid(shape, a.steps, Linear(0, ((Term(source, index), 1),)))


def _to_the_right(value: Grid, shape: Sequence[Linear]) -> dict[int, int]:
    shift = len(shape) - value.rank
    return {axis: axis + shift for axis in range(value.rank)}


def _without(items: Sequence[_T], axis: int) -> tuple[_T, ...]:
    return (*items[:axis], *items[axis + 1 :])

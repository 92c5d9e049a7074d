"""The steps of random index expressions: where they start, what keeps a run a run, and what nearly does.

Every step takes a value whose last axis counts the cells and returns another one, or None where it does not apply.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.property.index_programs import BOOL, F32, I32, I64, ONE, ROWS, Builder, N, Shape, Size, Value, aten

Step = Callable[[Builder, Value], Value | None]
Source = Callable[[Builder, Size], Value]

# --- sources of `length` numbers


def count(b: Builder, length: Size) -> Value:
    return b.call(aten.arange.default, [b.size(length)], (length,), I64)


def count_from(b: Builder, length: Size) -> Value:
    start, dtype = b.small(), b.rng.choice((I64, I32))
    return b.call(aten.arange.start, [start, b.size(length + start)], (length,), dtype, dtype=dtype)


def count_by_step(b: Builder, length: Size) -> Value:
    return b.call(aten.arange.start_step, [0, b.size(length)], (length,), I64)


def iota(b: Builder, length: Size) -> Value:
    how = {"start": b.small(), "step": 1, "dtype": I64, "device": "cpu", "requires_grad": False}
    return b.call(torch.ops.prims.iota.default, [b.size(length)], (length,), I64, **how)


def sum_of_ones(b: Builder, length: Size) -> Value:
    ones = b.call(aten.ones.default, [[b.size(length)]], (length,), I64, dtype=I64)
    return b.call(aten.cumsum.default, [ones, 0], (length,), I64)


def slice_of_longer(b: Builder, length: Size) -> Value:
    skip = b.small()
    longer = b.call(aten.arange.default, [b.size(length + skip)], (length + skip,), I64)
    return b.call(aten.slice.Tensor, [longer, 0, skip, b.rng.choice((9223372036854775807, b.size(length + skip)))], (length,), I64)


def written_out(b: Builder, length: Size) -> Value:
    """A constant, where the length allows one."""
    if length.n or length.rows:
        return count(b, length)
    return b.constant(torch.arange(length.const) + b.small())


def every_other(b: Builder, length: Size) -> Value:
    twice = Size(2 * length.const, 2 * length.n, 2 * length.rows)
    return b.call(aten.arange.start_step, [0, b.size(twice), 2], (length,), I64)


def backwards(b: Builder, length: Size) -> Value:
    return b.call(aten.arange.start_step, [b.size(length + -1), -1, -1], (length,), I64)


def any_positions(b: Builder, length: Size) -> Value:
    return b.positions if length == N else count(b, length)


def shuffled_constant(b: Builder, length: Size) -> Value:
    if length.n or length.rows:
        return every_other(b, length)
    values = list(range(length.const))
    b.rng.shuffle(values)
    return b.constant(torch.tensor(values, dtype=I64))


RUNS: tuple[Source, ...] = (count, count_from, count_by_step, iota, sum_of_ones, slice_of_longer, written_out)
NO_RUNS: tuple[Source, ...] = (every_other, backwards, any_positions, shuffled_constant)

# --- steps that keep a run a run


def plus_number(b: Builder, v: Value) -> Value:
    return b.call(aten.add.Tensor, [v, b.small()], v.shape, v.dtype)


def minus_number(b: Builder, v: Value) -> Value:
    return b.call(aten.sub.Tensor, [v, b.small()], v.shape, v.dtype, alpha=b.rng.choice((1, 2)))


def plus_scalar(b: Builder, v: Value) -> Value:
    return _sum(b, v, b.p)


def scalar_plus(b: Builder, v: Value) -> Value:
    return _sum(b, b.p, v)


def plus_one_element(b: Builder, v: Value) -> Value:
    return _sum(b, v, b.p_one, alpha=b.rng.choice((1, 2)))


def minus_scalar(b: Builder, v: Value) -> Value:
    return b.call(aten.sub.Tensor, [v, b.p], v.shape, _wide(v, b.p))


def plus_read_scalar(b: Builder, v: Value) -> Value:
    return b.call(aten.add.Tensor, [v, b.read_scalar()], v.shape, v.dtype)


def plus_computed_scalar(b: Builder, v: Value) -> Value:
    """A shift by a scalar of any origin is a shift."""
    op, args = b.rng.choice(
        (
            (aten.remainder.Scalar, [b.p, 7]),
            (aten.clamp.default, [b.p, 0, 9]),
            (aten.max.default, [b.positions]),
            (aten.sum.default, [b.p_one]),
        )
    )
    return _sum(b, v, b.call(op, args, (), I64))


def plus_rows(b: Builder, v: Value) -> Value | None:
    """A start for each row."""
    if any(size.rows for size in v.shape) or len(v.shape) != 1:
        return None
    start = b.p_rows
    if b.rng.random() < 0.3:
        start = b.call(aten.clamp.default, [start, 0, 30], start.shape, start.dtype)
    if b.rng.random() < 0.5:
        start = b.call(aten._to_copy.default, [start], start.shape, I64, dtype=I64)
    column = (
        b.call(aten.unsqueeze.default, [start, b.rng.choice((1, -1))], (ROWS, ONE), start.dtype)
        if b.rng.random() < 0.5
        else b.call(aten.view.default, [start, [-1, 1]], (ROWS, ONE), start.dtype)
    )
    return _sum(b, *((column, v) if b.rng.random() < 0.5 else (v, column)))


def plus_row_number(b: Builder, v: Value) -> Value | None:
    if len(v.shape) != 2 or v.shape[0] != ROWS:
        return None
    number = b.call(aten.arange.default, [b.size(ROWS)], (ROWS,), I64)
    number = b.call(aten.mul.Tensor, [number, 3], (ROWS,), I64)
    return _sum(b, v, b.call(aten.unsqueeze.default, [number, 1], (ROWS, ONE), I64))


def times_one(b: Builder, v: Value) -> Value:
    return b.call(aten.mul.Tensor, [v, 1], v.shape, v.dtype)


def twice_negative(b: Builder, v: Value) -> Value:
    return negative(b, negative(b, v))


def twice_subtracted(b: Builder, v: Value) -> Value:
    return b.call(aten.rsub.Scalar, [b.call(aten.rsub.Scalar, [v, 9], v.shape, v.dtype), 11], v.shape, v.dtype)


def twice_flipped(b: Builder, v: Value) -> Value:
    return flipped(b, flipped(b, v))


def positions_cancelled(b: Builder, v: Value) -> Value | None:
    if v.shape[-1] != N:
        return None
    return b.call(aten.sub.Tensor, [_sum(b, v, b.positions), b.positions], v.shape, I64)


def plus_zeros(b: Builder, v: Value) -> Value:
    zeros = b.call(aten.zeros.default, [[b.size(v.shape[-1])]], v.shape[-1:], I64, dtype=I64)
    return _sum(b, v, zeros)


def plus_filled(b: Builder, v: Value) -> Value:
    filled = b.call(aten.full.default, [[b.size(v.shape[-1])], b.small()], v.shape[-1:], I64, dtype=I64)
    return _sum(b, filled, v)


def cast(b: Builder, v: Value) -> Value:
    wanted = b.rng.choice((I32, I64))
    if b.rng.random() < 0.5:
        return b.call(aten._to_copy.default, [v], v.shape, wanted, dtype=wanted)
    return b.call(aten.to.dtype, [v, wanted], v.shape, wanted)


def copied(b: Builder, v: Value) -> Value:
    op = b.rng.choice((aten.clone.default, aten.alias.default, aten.detach.default, aten.contiguous.default))
    return b.call(op, [v], v.shape, v.dtype)


def flattened(b: Builder, v: Value) -> Value | None:
    if len(v.shape) != 1:
        return None
    axis = b.rng.choice((0, 1))
    shape = (*v.shape, ONE) if axis else (ONE, *v.shape)
    wide = b.call(aten.unsqueeze.default, [v, axis], shape, v.dtype)
    op = b.rng.choice((aten.view.default, aten.reshape.default, aten._reshape_copy.default))
    return b.call(op, [wide, [-1]], v.shape, v.dtype)


def there_and_back(b: Builder, v: Value) -> Value:
    """A new first axis, expanded, and one entry of it."""
    wide = b.call(aten.unsqueeze.default, [v, 0], (ONE, *v.shape), v.dtype)
    if b.rng.random() < 0.5:
        shape = (Size(3), *v.shape)
        wide = b.call(aten.expand.default, [wide, [3] + [-1] * len(v.shape)], shape, v.dtype)
    if b.rng.random() < 0.3:
        axis = len(wide.shape) - 1
        shape = (wide.shape[axis], *wide.shape[1:axis], wide.shape[0]) if axis else wide.shape
        wide = b.call(aten.transpose.int, [wide, 0, axis], shape, v.dtype)
        if axis == 1:
            return b.call(aten.select.int, [wide, 1, 0], v.shape, v.dtype)
        wide = b.call(aten.transpose.int, [wide, -1, 0], (wide.shape[axis], *wide.shape[1:axis], wide.shape[0]), v.dtype)
    if wide.shape[0] == ONE and b.rng.random() < 0.5:
        return b.call(aten.squeeze.dim, [wide, 0], v.shape, v.dtype)
    return b.call(aten.select.int, [wide, 0, b.rng.choice((0, -1))], v.shape, v.dtype)


def permuted_twice(b: Builder, v: Value) -> Value | None:
    if len(v.shape) != 2:
        return None
    swapped = b.call(aten.permute.default, [v, [1, 0]], v.shape[::-1], v.dtype)
    return b.call(aten.t.default, [swapped], v.shape, v.dtype)


def cut_and_joined(b: Builder, v: Value) -> Value:
    head, tail = _cut(b, v)
    return b.call(aten.cat.default, [[head, tail], -1], v.shape, v.dtype)


def either_run(b: Builder, v: Value) -> Value:
    condition = b.call(aten.gt.Scalar, [b.p, 5], (), BOOL)
    return b.call(aten.where.self, [condition, plus_scalar(b, v), plus_number(b, v)], v.shape, v.dtype)


KEEP: tuple[Step, ...] = (
    plus_number, minus_number, plus_scalar, plus_scalar, scalar_plus, plus_one_element, minus_scalar, plus_read_scalar,
    plus_computed_scalar, plus_rows, plus_rows, plus_rows, plus_row_number, times_one, twice_negative, twice_subtracted,
    twice_flipped, positions_cancelled, plus_zeros, plus_filled, cast, copied, flattened, there_and_back, permuted_twice,
    cut_and_joined, either_run,
)  # fmt: skip

# --- near misses


def negative(b: Builder, v: Value) -> Value:
    return b.call(aten.neg.default, [v], v.shape, v.dtype)


def flipped(b: Builder, v: Value) -> Value:
    return b.call(aten.flip.default, [v, [-1]], v.shape, v.dtype)


def subtracted_from(b: Builder, v: Value) -> Value:
    return b.call(aten.sub.Tensor, [b.p, v], v.shape, _wide(b.p, v))


def times(b: Builder, v: Value) -> Value:
    return b.call(aten.mul.Tensor, [v, b.rng.choice((0, 2, -1))], v.shape, v.dtype)


def scaled_by_alpha(b: Builder, v: Value) -> Value:
    return b.call(aten.add.Tensor, [b.p, v], v.shape, _wide(b.p, v), alpha=2)


def plus_positions(b: Builder, v: Value) -> Value | None:
    return _sum(b, v, b.positions) if v.shape[-1] == N else None


def wrapped(b: Builder, v: Value) -> Value:
    return b.call(aten.remainder.Scalar, [v, b.rng.choice((3, 8, 16))], v.shape, v.dtype)


def saturated(b: Builder, v: Value) -> Value:
    return b.call(aten.clamp.default, [v, None, b.rng.choice((2, 6, 12))], v.shape, v.dtype)


def halved(b: Builder, v: Value) -> Value:
    return b.call(aten.div.Tensor_mode, [v, 2], v.shape, v.dtype, rounding_mode="floor")


def rolled(b: Builder, v: Value) -> Value:
    return b.call(aten.roll.default, [v, [1], [len(v.shape) - 1]], v.shape, v.dtype)


def joined_the_wrong_way(b: Builder, v: Value) -> Value:
    head, tail = _cut(b, v)
    return b.call(aten.cat.default, [[tail, head], -1], v.shape, v.dtype)


def joined_off_by_one(b: Builder, v: Value) -> Value:
    head, tail = _cut(b, v)
    shifted = b.call(aten.add.Tensor, [tail, b.rng.choice((1, -1))], tail.shape, v.dtype)
    return b.call(aten.cat.default, [[head, shifted], -1], v.shape, v.dtype)


def through_float(b: Builder, v: Value) -> Value:
    """Keeps small numbers, but not all: refused on principle."""
    number = b.call(aten._to_copy.default, [v], v.shape, F32, dtype=F32)
    return b.call(aten._to_copy.default, [number], v.shape, I64, dtype=I64)


def one_cell_more_for_some(b: Builder, v: Value) -> Value | None:
    if v.shape[-1] != N:
        return None
    condition = b.call(aten.gt.Scalar, [b.positions, 5], (N,), BOOL)
    return b.call(aten.where.self, [condition, plus_number(b, v), v], v.shape, v.dtype)


def first_repeated(b: Builder, v: Value) -> Value:
    shape = (*v.shape[:-1], ONE)
    first = b.call(aten.slice.Tensor, [v, len(v.shape) - 1, 0, 1], shape, v.dtype)
    return b.call(aten.expand.default, [first, [-1] * (len(v.shape) - 1) + [b.size(v.shape[-1])]], v.shape, v.dtype)


def stacked_choice(b: Builder, v: Value) -> Value | None:
    """A run, but not to the algebra: stack lowers to a cat that goes on elsewhere."""
    if len(v.shape) != 1:
        return None
    both = b.call(aten.stack.default, [[v, b.call(aten.add.Tensor, [v, 4], v.shape, v.dtype)]], (Size(2), *v.shape), v.dtype)
    return b.call(aten.select.int, [both, 0, b.rng.choice((0, 1))], v.shape, v.dtype)


MISS: tuple[Step, ...] = (
    negative, flipped, subtracted_from, times, scaled_by_alpha, plus_positions, wrapped, saturated, halved, rolled,
    joined_the_wrong_way, joined_off_by_one, through_float, one_cell_more_for_some, first_repeated,
    stacked_choice,
)  # fmt: skip


def _wide(*values: Value) -> torch.dtype:
    """Type of a sum: tensors of rank 0 do not widen others."""
    ranked = [v.dtype for v in values if v.shape] or [v.dtype for v in values]
    return I64 if I64 in ranked else I32


def _sum(b: Builder, left: Value, right: Value, **kwargs: int) -> Value:
    a, c = left.shape, right.shape
    rank = max(len(a), len(c))
    a, c = (ONE,) * (rank - len(a)) + a, (ONE,) * (rank - len(c)) + c
    shape: Shape = tuple(y if x == ONE else x for x, y in zip(a, c, strict=True))
    return b.call(aten.add.Tensor, [left, right], shape, _wide(left, right), **kwargs)


def _cut(b: Builder, v: Value) -> tuple[Value, Value]:
    """The first cell and the rest."""
    axis = len(v.shape) - 1
    lead, length = v.shape[:-1], v.shape[-1]
    head = b.call(aten.slice.Tensor, [v, axis, 0, 1], (*lead, ONE), v.dtype)
    return head, b.call(aten.slice.Tensor, [v, axis, 1, 9223372036854775807], (*lead, length + -1), v.dtype)

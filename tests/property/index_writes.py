"""The last step of a random program: the write, in every form the extractor reads, right or nearly right."""

from __future__ import annotations

import operator
import random

import torch

from tests.property.index_programs import (
    CELLS,
    F32,
    HEAD_DIM,
    HEADS,
    I64,
    ONE,
    ROWS,
    Builder,
    IndexProgram,
    N,
    Shape,
    Size,
    Value,
    aten,
    world,
)
from tests.property.index_steps import KEEP, MISS, NO_RUNS, RUNS, Step

OPEN_END = 9223372036854775807
H, D, S = Size(HEADS), Size(HEAD_DIM), Size(CELLS)
STRAIGHT = (0, 1, 2, 3)


def random_program(seed: int) -> IndexProgram:
    """The program of `seed`: about half of them write one run for every size and start."""
    b = Builder(random.Random(seed))
    if b.rng.random() < 0.1:
        return _slice_program(b)
    length = b.rng.choice((N, N, N, N, Size(1), Size(4), Size(6)))
    v = b.pick(RUNS if b.rng.random() < 0.93 else NO_RUNS)(b, length)
    for _ in range(b.rng.randint(0, 6)):
        step: Step = b.pick(KEEP if b.rng.random() < 0.88 else MISS)
        v = step(b, v) or v
    return _indexed_program(b, v)


def _indexed_program(b: Builder, index: Value) -> IndexProgram:
    length = index.shape[-1]
    per_row = len(index.shape) == 2
    rows = ROWS if per_row or b.rng.random() < 0.5 else Size(2)
    cache = b.placeholder("cache", (rows, H, S, D), F32)
    update_shape: Shape = (rows, H, length, D)
    forms = ("rows", "rows_and_heads", "scatter") if per_row else ("index_copy", "index_copy", "index_put", "rows", "scatter")
    form = b.rng.choice(forms)
    b.trail.append(form)
    axes = STRAIGHT
    if form == "rows":
        update_shape, axes = (rows, length, H, D), (0, 2, 1, 3)
    update = b.placeholder("update", update_shape, F32)
    if form in ("index_copy", "scatter") and index.dtype != I64:  # these take 64-bit indices only
        index = b.call(aten._to_copy.default, [index], index.shape, I64, dtype=I64)
    if form == "index_copy":
        written = b.call(aten.index_copy.default, [cache, b.rng.choice((2, -2)), index, update], cache.shape, F32)
    elif form == "index_put":
        written = b.call(aten.index_put.default, [cache, [None, None, index], update], cache.shape, F32)
    elif form == "rows":
        written = b.call(aten.index_put.default, [cache, [_row_numbers(b, rows, 2), None, index], update], cache.shape, F32)
    elif form == "rows_and_heads":
        cells = b.call(aten.unsqueeze.default, [index, 1], (rows, ONE, length), index.dtype)
        indices = [_row_numbers(b, rows, 3), _head_numbers(b), cells]
        written = b.call(aten.index_put.default, [cache, indices, update], cache.shape, F32)
    else:
        written = b.call(aten.scatter.src, [cache, 2, _spread(b, index, rows), update], cache.shape, F32)
    return _finished(b, cache, update, axes, written, index)


def _row_numbers(b: Builder, rows: Size, rank: int) -> Value:
    """0, 1, .. down the first axis of a tensor of `rank`, or nearly."""
    numbers = b.call(aten.arange.default, [b.size(rows)], (rows,), I64)
    if b.rng.random() < 0.05:
        b.trail.append("rows backwards")
        numbers = b.call(aten.flip.default, [numbers, [0]], (rows,), I64)
    elif b.rng.random() < 0.05:
        b.trail.append("one row for all")
        numbers = b.call(aten.mul.Tensor, [numbers, 0], (rows,), I64)
    for axis in range(1, rank):
        numbers = b.call(aten.unsqueeze.default, [numbers, axis], (*numbers.shape, ONE), I64)
    return numbers


def _head_numbers(b: Builder) -> Value:
    if b.rng.random() < 0.05:
        b.trail.append("heads backwards")
        return b.constant(torch.arange(HEADS - 1, -1, -1)[:, None])
    numbers = b.call(aten.arange.default, [HEADS], (H,), I64)
    return b.call(aten.unsqueeze.default, [numbers, -1], (H, ONE), I64)


def _spread(b: Builder, index: Value, rows: Size) -> Value:
    """The index for every row, head and element, as scatter wants it."""
    for axis in (0, 1) if len(index.shape) == 1 else (1,):
        shape = (*index.shape[:axis], ONE, *index.shape[axis:])
        index = b.call(aten.unsqueeze.default, [index, axis], shape, index.dtype)
    index = b.call(aten.unsqueeze.default, [index, 3], (*index.shape, ONE), index.dtype)
    sizes = [b.size(rows), HEADS, b.size(index.shape[2]), HEAD_DIM]
    return b.call(aten.expand.default, [index, sizes], (rows, H, index.shape[2], D), I64)


def _slice_program(b: Builder) -> IndexProgram:
    rows = b.rng.choice((ROWS, Size(2)))
    cache = b.placeholder("cache", (rows, H, S, D), F32)
    kind = b.rng.choice(("numbers", "numbers", "read", "select", "heads"))
    b.trail.append(f"slice by {kind}")
    if kind == "select":
        update = b.placeholder("update", (rows, H, D), F32)
        cell = b.rng.choice((0, 7, -1, CELLS - 1, b.read_scalar()))
        written = b.call(aten.select_scatter.default, [cache, update, 2, cell], cache.shape, F32)
        return _finished(b, cache, update, (0, 1, None, 2), written, None)
    if kind == "heads":
        update = b.placeholder("update", (rows, ONE, S, D), F32)
        written = b.call(aten.slice_scatter.default, [cache, update, 1, 0, 1], cache.shape, F32)
        return _finished(b, cache, update, STRAIGHT, written, None)
    if kind == "read":
        start = b.read_scalar()
        end = b.graph.call_function(operator.add, (start, b.size(N)))
        end.meta["val"] = world().read + world().n
        update = b.placeholder("update", (rows, H, N, D), F32)
        written = b.call(aten.slice_scatter.default, [cache, update, b.rng.choice((2, -2)), start, end], cache.shape, F32)
        return _finished(b, cache, update, STRAIGHT, written, None)
    first = b.rng.choice((None, 0, 3, -4, -CELLS, CELLS - 2))
    end = b.rng.choice((None, 9, -1, CELLS, OPEN_END, CELLS + 5))
    step = b.rng.choice((1, 1, 1, 2))
    length = len(range(CELLS)[slice(first, end, step)])
    update = b.placeholder("update", (rows, H, Size(length), D), F32)
    written = b.call(aten.slice_scatter.default, [cache, update, 2, first, end, step], cache.shape, F32)
    return _finished(b, cache, update, STRAIGHT, written, None)


def _finished(
    b: Builder, cache: Value, update: Value, axes: tuple[int | None, ...], written: Value, index: Value | None
) -> IndexProgram:
    b.graph.output((written.node,))
    return IndexProgram(b.graph, cache, update, axes, written.node, index, b.constants, b.inputs, b.trail)

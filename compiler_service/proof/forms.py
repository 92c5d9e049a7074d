"""What each write operator does to the tensor it writes: which axis, from which cell on, how many cells, from which rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from compiler_service.proof import algebra, rules
from compiler_service.proof.algebra import ONE, ZERO, Grid, Linear
from compiler_service.proof.evaluate import Values, bind
from compiler_service.proof.indices import NotARun, axis_of, covered_axis, index_grid, node_of, run_start
from compiler_service.proof.verdict import Refuted, Unknown

OPEN_END = (1 << 63) - 1
"""How an open-ended slice arrives."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The cache as the operator sees it, maybe with its axes moved: `axes[k]` is the cache's axis behind the operator's `k`."""

    node: fx.Node
    sizes: tuple[Linear, ...]
    axes: tuple[int, ...]
    row: int
    seq: int

    @property
    def rank(self) -> int:
        return len(self.sizes)


@dataclass(frozen=True, slots=True)
class Cells:
    """A run along `axis`, in the frame's axes. `start` has its row on axis 0. The update's axis `update_axes[k]` runs along
    the frame's axis `k`; None: the update has no such axis and one cell is written."""

    axis: int
    start: Linear
    length: Linear
    update: fx.Node
    update_axes: tuple[int | None, ...]


Arguments = Mapping[str, object]


def _index_copy(values: Values, frame: Frame, arguments: Arguments) -> Cells:
    node = node_of(arguments["index"])
    index = index_grid(values, node)
    if index.rank != 1:
        raise NotARun(Unknown(f"the index has rank {index.rank}, a run needs rank 1", node.name))
    start = run_start(values, index, 0, node, row=None)
    axis = axis_of(arguments["dim"], frame.rank)
    return Cells(axis, start, index.shape[0], node_of(arguments["source"]), tuple(range(frame.rank)))


def _scatter(values: Values, frame: Frame, arguments: Arguments) -> Cells:
    axis = axis_of(arguments["dim"], frame.rank)
    node = node_of(arguments["index"])
    index = index_grid(values, node)
    for k, size in enumerate(index.shape):
        if k != axis and size != frame.sizes[k]:
            raise NotARun(Unknown(f"the index covers {size} of {frame.sizes[k]} along axis {frame.axes[k]}", node.name))
    start = run_start(values, index, axis, node, row=frame.row)
    return Cells(axis, start, index.shape[axis], node_of(arguments["src"]), tuple(range(frame.rank)))


def _slice_scatter(values: Values, frame: Frame, arguments: Arguments) -> Cells:
    axis = axis_of(arguments["dim"], frame.rank)
    update = _assigned(values, node_of(arguments["src"]))
    shape = values.shape(update)
    if len(shape) != frame.rank:
        raise NotARun(Unknown("the update is broadcast", update.name))
    start, _ = slice_bounds(values, arguments, frame.sizes[axis])
    step = _scalar(values, arguments["step"], frame.node)
    if step != ONE and not algebra.is_single(shape[axis]):
        raise NotARun(Refuted(f"the first two cells are {start} and {start + step}: step {step}", frame.node.name))
    return Cells(axis, start, shape[axis], update, tuple(range(frame.rank)))


def _select_scatter(values: Values, frame: Frame, arguments: Arguments) -> Cells:
    axis = axis_of(arguments["dim"], frame.rank)
    cell = _scalar(values, arguments["index"], frame.node)
    if cell.is_constant and cell.const < 0:
        cell = cell + frame.sizes[axis]
    return Cells(axis, cell, ONE, _assigned(values, node_of(arguments["src"])), _all_axes_but(axis, frame.rank))


def _copy(values: Values, frame: Frame, arguments: Arguments) -> Cells:
    return Cells(frame.seq, ZERO, frame.sizes[frame.seq], node_of(arguments["src"]), tuple(range(frame.rank)))


def _where(values: Values, frame: Frame, arguments: Arguments) -> Cells:
    """`where(counting == cell, update, cache)`: what a single-cell write decomposes into."""
    condition, update = node_of(arguments["condition"]), node_of(arguments["self"])
    if str(condition.target) not in rules.EQUALITY:
        raise NotARun(Unknown(f"the cells are chosen by {condition.target}, not by one index", condition.name))
    compared = bind(condition)
    difference = algebra.add(index_grid(values, compared["self"]), index_grid(values, compared["other"]), -1)
    gap = difference and algebra.broadcast(difference, frame.sizes)
    stepped = [] if gap is None else [k for k, step in enumerate(gap.steps) if step]
    if gap is None or len(stepped) != 1 or abs(gap.steps[stepped[0]]) != 1:
        raise NotARun(Unknown("the cells are not chosen by one index", condition.name))
    (axis,) = stepped
    sign = gap.steps[axis]
    cell = run_start(values, algebra.scale(gap, sign), axis, condition, row=frame.row).scaled(-1)
    if str(update.target) == rules.EXPAND:
        update = node_of(bind(update)["self"])
    if len(values.shape(update)) != frame.rank:
        raise NotARun(Unknown("the update is broadcast", update.name))
    return Cells(axis, cell, ONE, update, tuple(range(frame.rank)))


def _index_put(values: Values, frame: Frame, arguments: Arguments) -> Cells:
    if arguments["accumulate"]:
        raise NotARun(Refuted("it adds to the cells instead of writing them", frame.node.name))
    given = arguments["indices"]
    assert isinstance(given, list | tuple)
    nodes = {k: node_of(item) for k, item in enumerate(given) if item is not None}
    if frame.seq not in nodes:
        along = ", ".join(str(frame.axes[k]) for k in nodes)
        raise NotARun(Refuted(f"it indexes axis {along}, the cells lie along axis {frame.axes[frame.seq]}", frame.node.name))
    shape, indices = _broadcast_together({k: index_grid(values, node) for k, node in nodes.items()}, frame)
    if not shape:
        raise NotARun(Unknown("the index has rank 0, a run needs rank 1", nodes[frame.seq].name))
    # Every index but the sequence's must count a whole axis of the cache along an axis of its own.
    along_axis: dict[int, int | None] = {}
    for k, index in indices.items():
        if k != frame.seq:
            along_axis[k] = covered_axis(index, frame.sizes[k], frame.axes[k], nodes[k], along_axis.values())
    free = [j for j, size in enumerate(shape) if j not in along_axis.values() and size != ONE]
    if len(free) > 1:
        raise NotARun(Unknown(f"cells are indexed along {len(free)} axes at once", nodes[frame.seq].name))
    seq = free[0] if free else None
    start = run_start(values, indices[frame.seq], seq, nodes[frame.seq], row=along_axis.get(frame.row))
    along_axis[frame.seq] = seq
    update, update_axes = _put_update(values, node_of(arguments["values"]), shape, along_axis, frame)
    return Cells(frame.seq, start, ONE if seq is None else shape[seq], update, update_axes)


def _put_update(
    values: Values, update: fx.Node, index_shape: Sequence[Linear], along_axis: dict[int, int | None], frame: Frame
) -> tuple[fx.Node, tuple[int | None, ...]]:
    """Where the values' axes run. The index axes stand together: in place if the indexed axes are neighbours, else in front."""
    indexed = sorted(along_axis)
    neighbours = indexed == list(range(indexed[0], indexed[-1] + 1))
    kept = [k for k in range(frame.rank) if k not in along_axis]
    at = indexed[0] if neighbours else 0
    full = [frame.sizes[k] for k in kept]
    full[at:at] = index_shape
    # An index axis of size 1 that nothing claimed is the axis of a cache axis indexed by one value.
    spare = [j for j, size in enumerate(index_shape) if size == ONE and j not in along_axis.values()]
    place: list[int | None] = [None] * frame.rank
    for position, k in enumerate(kept):
        place[k] = position + (len(index_shape) if position >= at else 0)
    for k in indexed:
        j = along_axis[k]
        if j is None and spare:
            j = spare.pop(0)
        place[k] = None if j is None else at + j
    # Values may leave out leading axes of size 1; any other difference in shape repeats them.
    missing = len(full) - len(values.shape(update))
    if missing < 0 or any(size != ONE for size in full[:missing]):
        raise NotARun(Unknown("the update is broadcast", update.name))
    return update, tuple(None if axis is None or axis < missing else axis - missing for axis in place)


def _broadcast_together(indices: Mapping[int, Grid], frame: Frame) -> tuple[tuple[Linear, ...], dict[int, Grid]]:
    shape: tuple[Linear, ...] | None = ()
    for index in indices.values():
        shape = None if shape is None else algebra.common_shape(shape, index.shape)
    whole = {} if shape is None else {k: algebra.broadcast(index, shape) for k, index in indices.items()}
    found = {k: index for k, index in whole.items() if index is not None}
    if shape is None or len(found) != len(indices):
        raise NotARun(Unknown("the indices do not certainly broadcast together", frame.node.name))
    return shape, found


def slice_bounds(values: Values, arguments: Arguments, size: Linear) -> tuple[Linear, Linear]:
    """First index and end of a slice of an axis of `size`, by Python's rules.

    A bound whose sign only a step decides is taken as it stands; the launch check refuses a start below 0.
    """
    node = node_of(arguments["self"])
    start = ZERO if arguments.get("start") is None else _scalar(values, arguments["start"], node)
    end = size if arguments.get("end") is None else _scalar(values, arguments["end"], node)
    if end.is_constant and size.is_constant:
        end = algebra.constant(min(max(0, end.const + size.const if end.const < 0 else end.const), size.const))
    elif end.is_constant and end.const >= OPEN_END:
        end = size
    return rules.slice_start(start, size) or start, end


def _scalar(values: Values, value: object, node: fx.Node) -> Linear:
    found = values.scalar(value)
    if found is None:
        raise NotARun(Unknown(f"{value} is no single integer", node.name))
    return found


def _assigned(values: Values, update: fx.Node) -> fx.Node:
    """The rows under `copy(view of the cache, rows)`: an assignment to a slice copies into the view it then scatters."""
    while str(update.target) == rules.COPY:
        inner = node_of(bind(update)["src"])
        if values.shape(inner) != values.shape(update):
            raise NotARun(Unknown("the update is broadcast", inner.name))
        update = inner
    return update


def _all_axes_but(axis: int, rank: int) -> tuple[int | None, ...]:
    return tuple(None if k == axis else k - (k > axis) for k in range(rank))


FORMS: Mapping[str, Callable[[Values, Frame, Arguments], Cells]] = {
    "index_copy": _index_copy,
    "index_put": _index_put,
    "slice_scatter": _slice_scatter,
    "select_scatter": _select_scatter,
    "scatter": _scatter,
    "where": _where,
    "copy": _copy,
}

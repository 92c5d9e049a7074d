"""When an index, as a value of the algebra, is one ascending run, or counts a whole axis."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, fx

from compiler_service.proof import algebra
from compiler_service.proof.algebra import ONE, ZERO, Grid, Linear
from compiler_service.proof.evaluate import INDEX_DTYPES, Values, preview
from compiler_service.proof.verdict import Refuted, Unknown


class NotARun(Exception):
    """Reading a write ends here, with this verdict."""

    def __init__(self, verdict: Refuted | Unknown) -> None:
        super().__init__(str(verdict))
        self.verdict = verdict


def node_of(value: object) -> fx.Node:
    """A tensor argument. ValueError for anything else: the operator's schema promises a tensor."""
    if not isinstance(value, fx.Node):
        raise ValueError(f"a tensor argument was expected, got {value!r}")
    return value


def axis_of(value: object, rank: int) -> int:
    """An axis argument, counted from the front."""
    if not isinstance(value, int):
        raise ValueError(f"an axis number was expected, got {value!r}")
    return value % rank


def index_grid(values: Values, value: object) -> Grid:
    """The value of an index argument: a Python int or an integer tensor."""
    if isinstance(value, int):
        return algebra.uniform(algebra.constant(value))
    node = node_of(value)
    traced = node.meta["val"]
    if isinstance(traced, Tensor) and traced.dtype not in INDEX_DTYPES:
        raise NotARun(Unknown(f"the index {node.name} is {traced.dtype}, not 32- or 64-bit integers", node.name))
    return values.grid(node)


def run_start(values: Values, index: Grid, axis: int | None, node: fx.Node, *, row: int | None) -> Linear:
    """Start of the run that `index` is along `axis`, its row on axis 0; it may differ only along the index axis `row`.

    `axis` is None for a single cell.
    """
    if axis is not None:
        opaque = [term for term, _ in index.base.terms if term.varies_along(axis)]
        if opaque:
            table = values.table(opaque[0].source)
            if table is not None and len(opaque) == 1 and not any(index.steps):
                raise NotARun(Refuted(f"the constant {opaque[0].source} holds {preview(table)}: not ascending by one", node.name))
            raise NotARun(Unknown("; ".join(sorted({values.reason(term.source) for term in opaque})), node.name))
        step = index.steps[axis]
        if step != 1 and not algebra.is_single(index.shape[axis]):
            second = index.base + algebra.constant(step)
            raise NotARun(Refuted(f"the first two cells are {index.base} and {second}: step {step}", node.name))
    start = algebra.per_row(index if axis is None else algebra.select(index, axis, ZERO), _row_without(axis, row))
    if start is None:
        others = [other for other in index.varying_axes if other not in (axis, row)]
        raise NotARun(Unknown(f"the start is not the same along axis {others[0]} of the index", node.name))
    return start


def _row_without(axis: int | None, row: int | None) -> int | None:
    """Number of the row axis once `axis` is gone."""
    return row - 1 if row is not None and axis is not None and axis < row else row


def covered_axis(index: Grid, size: Linear, axis: int, node: fx.Node, taken: Collection[int | None]) -> int | None:
    """The index axis along which `index` counts `0..size`, all of cache axis `axis`; None for the one index of a single one."""
    varying = index.varying_axes
    if size == ONE and not varying and index.base == ZERO:
        return None
    counts = len(varying) == 1 and index.steps[varying[0]] == 1 and index.base == ZERO
    if not counts or varying[0] in taken:
        raise NotARun(Unknown(f"axis {axis} is indexed by something else than 0..{size} in order", node.name))
    if index.shape[varying[0]] != size:
        raise NotARun(Unknown(f"axis {axis} is indexed by 0..{index.shape[varying[0]]}, it has {size}", node.name))
    return varying[0]

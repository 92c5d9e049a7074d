"""Finding a cache's write in a functional graph and reading it as a run of cells.

The value written back is followed to the operator that makes it out of the cache's old content. Views around that operator
(slices over the whole axis, moved axes) are looked through; copies are not, since in place they would be other memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from compiler_service.proof import places, rules
from compiler_service.proof.algebra import ONE, ZERO
from compiler_service.proof.evaluate import Values, bind
from compiler_service.proof.forms import FORMS, Cells, Frame, slice_bounds
from compiler_service.proof.indices import NotARun, axis_of, node_of
from compiler_service.proof.places import Kind, Place
from compiler_service.proof.program import ROW_AXIS, CacheNodes
from compiler_service.proof.verdict import Proved, Refuted, Run, Unknown, Verdict


@dataclass(frozen=True, slots=True)
class Write:
    """How one cache is written.

    `node` makes the new content, as the form `form`, from the rows of `update`: the update's axis `update_axes[a]` runs along
    the cache's axis `a` (None: the update has no such axis, one cell is written). `path` holds the nodes whose destination
    may be a view of the old content because they are the write; `contents` those that hold the new one, and where in each
    its rows and cells lie.
    """

    node: fx.Node
    form: str
    verdict: Verdict
    update: fx.Node | None = None
    update_axes: tuple[int | None, ...] = ()
    path: frozenset[fx.Node] = frozenset()
    contents: Mapping[fx.Node, Place] = field(default_factory=dict)


def read_write(values: Values, name: str, cache: CacheNodes) -> Write:
    """The write of one cache. The verdict speaks of the cells only; hazards around the write are `hazards.py`'s."""
    if cache.new is None:
        return Write(cache.old, "none", Unknown(f"nothing in the program writes {name}", cache.old.name))
    reader = _Reader(values, name, cache)
    try:
        return reader.read(cache.new)
    except NotARun as end:
        return Write(reader.node, reader.form, end.verdict)


class _Reader:
    def __init__(self, values: Values, name: str, cache: CacheNodes) -> None:
        self._values = values
        self._name = name
        self._cache = cache
        self._shape = values.shape(cache.old)
        self._path: set[fx.Node] = set()
        self._contents: dict[fx.Node, tuple[int, ...]] = {}
        self.node = cache.new or cache.old
        self.form = "none"

    def read(self, new: fx.Node) -> Write:
        moved, outer = self._under_axis_moves(new)
        axes = tuple(outer.index(axis) for axis in range(len(outer)))
        node = self.node = self._under_wrappers(moved, axes)
        if _op(node) not in rules.WRITES:
            return self._overwritten(new)
        self.form = rules.WRITES[_op(node)]
        axes = self._axes_of(destination_of(node))
        if tuple(axes[axis] for axis in outer) != tuple(range(len(axes))):
            raise NotARun(Unknown(f"the new content of {self._name} has its axes in another order than the cache", new.name))
        self._path.add(node)
        self._contents[node] = axes
        frame = self._frame(node, axes)
        cells = FORMS[self.form](self._values, frame, bind(node))
        if cells.axis != frame.seq:
            wrote, wanted = axes[cells.axis], self._cache.decl.seq_axis
            raise NotARun(Refuted(f"it writes along axis {wrote}, the cells of {self._name} lie along axis {wanted}", node.name))
        return self._checked(frame, cells)

    def _overwritten(self, new: fx.Node) -> Write:
        """The write of all cells with a value that was not made from the cache."""
        if any(self._leads_to_cache(operand) for operand in (self.node, *self.node.all_input_nodes)):
            told = f"the new content of {self._name} is made by {_op(self.node)}, which is no cache write"
            raise NotARun(Unknown(told, self.node.name))
        self.node, self.form = new, "copy"
        self._path.clear()
        self._contents = {new: tuple(range(len(self._shape)))}
        frame = self._frame(new, tuple(range(len(self._shape))))
        return self._checked(frame, Cells(frame.seq, ZERO, self._shape[frame.seq], new, tuple(range(frame.rank))))

    def _frame(self, node: fx.Node, axes: tuple[int, ...]) -> Frame:
        decl = self._cache.decl
        sizes = tuple(self._shape[axis] for axis in axes)
        return Frame(node=node, sizes=sizes, axes=axes, row=axes.index(ROW_AXIS), seq=axes.index(decl.seq_axis))

    def _checked(self, frame: Frame, cells: Cells) -> Write:
        """The write in the cache's own axes."""
        self._compare_with_update(frame, cells)
        decl = self._cache.decl
        run = Run(self._name, decl.seq_axis, cells.start, cells.length, self._shape[ROW_AXIS])
        return Write(
            node=frame.node,
            form=self.form,
            verdict=Proved(run),
            update=cells.update,
            update_axes=tuple(cells.update_axes[frame.axes.index(axis)] for axis in range(frame.rank)),
            path=frozenset(self._path),
            contents={
                node: places.of_kinds(node.meta["val"], [self._kind(axis) for axis in axes])
                for node, axes in self._contents.items()
            },
        )

    def _kind(self, axis: int) -> Kind | None:
        return {ROW_AXIS: Kind.ROW, self._cache.decl.seq_axis: Kind.CELL}.get(axis)

    def _compare_with_update(self, frame: Frame, cells: Cells) -> None:
        """Update and cache have one dtype, the same sizes, fixed but for the rows, and the update exactly the run's length."""
        decl = self._cache.decl
        self._same_dtype(cells.update)
        shape = self._values.shape(cells.update)
        for k, size in enumerate(frame.sizes):
            open_ended = k == frame.row or (k == frame.seq and decl.max_len is not None)
            if not size.is_constant and not open_ended:
                raise NotARun(Unknown(f"axis {frame.axes[k]} of {self._name} has no fixed size: {size}", self._cache.old.name))
            wanted = cells.length if k == frame.seq else size
            own = cells.update_axes[k]
            got = ONE if own is None else shape[own]
            if got != wanted:
                raise NotARun(
                    Unknown(f"the update has size {got} along axis {frame.axes[k]}, the write takes {wanted}", cells.update.name)
                )

    def _same_dtype(self, update: fx.Node) -> None:
        held, given = self._cache.old.meta["val"].dtype, update.meta["val"].dtype
        if held != given:
            raise NotARun(Refuted(f"{self._name} holds {held}, the update is {given}", update.name))

    def _under_axis_moves(self, node: fx.Node) -> tuple[fx.Node, tuple[int, ...]]:
        """The node under moved axes (and copies of the outcome), and for each axis of the outer value the axis of that node."""
        order = tuple(range(len(self._shape)))
        while _op(node) in rules.WHOLE_VIEWS | rules.CLONES:
            self._contents[node] = tuple(order.index(axis) for axis in range(len(order)))
            order = _through(node, order)
            node = node_of(bind(node)["self"])
        return node, order

    def _under_wrappers(self, node: fx.Node, axes: tuple[int, ...]) -> fx.Node:
        """The write inside a write-back of the whole cache, or in slices over whole axes; `axes` are the cache's behind theirs."""
        while _op(node) == rules.COPY or (rules.WRITES.get(_op(node)) == "slice_scatter" and self._spans_axis(node)):
            inner = node_of(bind(node)["src"])
            if _op(inner) not in rules.WRITES or not self._leads_to_cache(destination_of(inner)):
                return node
            self._same_dtype(inner)
            self._axes_of(destination_of(node))
            self._path.add(node)
            self._contents[node] = axes
            node = inner
        return node

    def _axes_of(self, destination: fx.Node) -> tuple[int, ...]:
        """For each axis of `destination`, the cache's axis, if it is a view of the whole cache."""
        order = tuple(range(len(self._shape)))
        node = destination
        while node is not self._cache.old:
            whole = _op(node) in rules.WHOLE_VIEWS or (_op(node) == rules.SLICE and self._spans_axis(node))
            if not whole:
                raise NotARun(self._wrong_destination(node, destination))
            order = _through(node, order)
            node = node_of(bind(node)["self"])
        return order

    def _wrong_destination(self, node: fx.Node, destination: fx.Node) -> Refuted | Unknown:
        if not self._leads_to_cache(node):
            return Unknown(f"{self.node.name} writes {destination.name}, which is not {self._name}", destination.name)
        if _op(node) in rules.WRITES:
            return Refuted(f"{self._name} is written twice, by {node.name} and then by {self.node.name}", self.node.name)
        return Refuted(f"the write reaches {self._name} through {node.name} ({_op(node)}), not the cache itself", node.name)

    def _leads_to_cache(self, node: fx.Node) -> bool:
        """Whether `node` is the cache, part of it, a copy of it, or the outcome of an earlier write to one of these."""
        while node is not self._cache.old:
            if _op(node) in rules.WRITES:
                node = destination_of(node)
            elif _op(node) in rules.WHOLE_VIEWS | rules.SLICES | rules.RESHAPES | rules.COPIES:
                node = node_of(bind(node)["self"])
            else:
                return False
        return True

    def _spans_axis(self, node: fx.Node) -> bool:
        """Whether a slice, or a write to one, covers its axis from end to end."""
        arguments = bind(node)
        shape = self._values.shape(node_of(arguments["self"]))
        size = shape[axis_of(arguments["dim"], len(shape))]
        return slice_bounds(self._values, arguments, size) == (ZERO, size) and arguments["step"] == 1


def _op(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_function" else node.op


def destination_of(write: fx.Node) -> fx.Node:
    """What a write operator writes to."""
    return node_of(bind(write)["other" if rules.WRITES[_op(write)] == "where" else "self"])


def _through(node: fx.Node, order: Sequence[int]) -> tuple[int, ...]:
    """`order` given in the axes of a view, in the axes of what it views."""
    if _op(node) not in rules.AXIS_MOVES:
        return tuple(order)
    arguments = bind(node)
    moved = list(range(len(order)))
    if isinstance(arguments.get("dims"), list | tuple):
        moved = [axis_of(axis, len(order)) for axis in arguments["dims"]]  # type: ignore[attr-defined]  # checked just above
    else:
        first, second = axis_of(arguments.get("dim0", 0), len(order)), axis_of(arguments.get("dim1", 1), len(order))
        moved[first], moved[second] = moved[second], moved[first]
    return tuple(moved[axis] for axis in order)

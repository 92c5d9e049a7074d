"""Attention masks as inequalities over the index algebra: which cells a query may see.

A mask is read as a conjunction of bounds, affine grids over `[.., query, cell]`: the cell is visible where each is at least 0, or,
of a chunked mask, where query and cell lie in one chunk. Boolean masks are comparisons; additive ones are 0 where such a condition
holds and very negative where not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import fx

from compiler_service.proof import algebra, rules
from compiler_service.proof.algebra import Grid
from compiler_service.proof.attention import Mask, is_boolean
from compiler_service.proof.evaluate import Values, bind
from compiler_service.proof.program import Program


@dataclass(frozen=True, slots=True)
class Bound:
    """`grid >= 0`; with `chunk`, `grid` is the difference query - cell of two numbers in one chunk of so many, counted from 0."""

    grid: Grid
    chunk: int | None = None


Bounds = tuple[Bound, ...]

_HIDDEN = -1e4
"""An additive mask hides what it lowers by at least this much (float16 models use numbers near its minimum, -65504)."""


def visible_where(program: Program, values: Values, masks: Iterable[Mask]) -> list[Bounds]:
    """The conditions under which each of `masks`, put on in this order, lets a cell be seen, of those that can be read."""
    reader = _Reader(program, values)
    found: list[Bounds] = []
    for mask in masks:
        if mask.filling is not None and not reader.hides(mask.filling):
            found.clear()  # it gives cells that were hidden before a score to be seen by
            continue
        bounds = reader.negated(mask.node) if mask.hides else reader.read(mask.node)
        if bounds is not None:
            found.append(bounds)
    return found


class _Reader:
    def __init__(self, program: Program, values: Values) -> None:
        self._program = program
        self._values = values

    def read(self, node: fx.Node) -> Bounds | None:
        """A boolean tensor is true, any other one about 0, where the cell is visible: neither is the other's cast."""
        name = str(node.target)
        if name in rules.LAYOUT:
            return self._moved(node)
        arguments = bind(node) if node.op == "call_function" else {}
        return self._boolean(node, name, arguments) if is_boolean(node) else self._additive(node, name, arguments)

    def _boolean(self, node: fx.Node, name: str, arguments: dict[str, object]) -> Bounds | None:
        if name in rules.AT_MOST:
            return self._comparison(node, arguments)
        if name in rules.EQUALITY:
            return self._one_chunk(node, arguments)
        if name in rules.NOT:
            return self.negated(arguments["self"])
        if name in rules.BOTH:
            return self._both(node, arguments)
        return () if self._number(node) == 1 else None

    def _additive(self, node: fx.Node, name: str, arguments: dict[str, object]) -> Bounds | None:
        if name in rules.CHOICES:
            return self._choice(arguments)
        if name in rules.FILL_MASKED and self._number(arguments["self"]) == 0 and self.hides(arguments["value"]):
            return self.negated(arguments["mask"])
        if name in rules.SUMS and arguments.get("alpha", 1) == 1:
            return self._both(node, arguments)
        return None

    def _moved(self, node: fx.Node) -> Bounds | None:
        operand = _moved_operand(node)
        inner = self.read(operand) if isinstance(operand, fx.Node) and is_boolean(operand) == is_boolean(node) else None
        return None if inner is None else _each(inner, lambda grid: self._values.moved(node, grid))

    def _both(self, node: fx.Node, arguments: dict[str, object]) -> Bounds | None:
        found: Bounds = ()
        for name in ("self", "other"):
            side = arguments[name]
            inner = self.read(side) if isinstance(side, fx.Node) and is_boolean(side) == is_boolean(node) else None
            repeated = inner and _each(inner, lambda grid: algebra.broadcast(grid, self._values.shape(node)))
            if repeated is None:
                return None
            found += repeated
        return found

    def _comparison(self, node: fx.Node, arguments: dict[str, object]) -> Bounds | None:
        sign, slack = rules.AT_MOST[str(node.target)]
        left, right = self._integers(arguments["self"]), self._integers(arguments["other"])
        difference = algebra.add(left, right, -1) if left is not None and right is not None else None
        bound = difference and algebra.add(algebra.scale(difference, sign), algebra.uniform(algebra.constant(slack)))
        return None if bound is None else _each((Bound(bound),), lambda grid: algebra.broadcast(grid, self._values.shape(node)))

    def _one_chunk(self, node: fx.Node, arguments: dict[str, object]) -> Bounds | None:
        """`x // n == y // n`, one of them the cells: chunks that begin within the cache would part what the last query sees."""
        left, right = self._quotient(arguments["self"]), self._quotient(arguments["other"])
        if left is None or right is None or left[1] != right[1]:
            return None
        cells = left[0] if left[0].steps[-1:] not in ((), (0,)) else right[0]
        if cells.base != algebra.ZERO:
            return None
        difference = algebra.add(left[0], right[0], -1)
        difference = difference and algebra.broadcast(difference, self._values.shape(node))
        if difference is None:
            return None
        if difference.rank and difference.steps[-1] > 0:  # cell - query
            difference = algebra.scale(difference, -1)
        return (Bound(difference, chunk=left[1]),)

    def _quotient(self, value: object) -> tuple[Grid, int] | None:
        """(dividend, divisor) of a division that rounds down to integers."""
        if not isinstance(value, fx.Node) or str(value.target) not in rules.DIVISIONS:
            return None
        arguments = bind(value)
        dividend, divisor = self._integers(arguments["self"]), arguments["other"]
        rounding = arguments.get("rounding_mode", rules.DIVISIONS[str(value.target)])
        if dividend is None or not isinstance(divisor, int) or divisor < 1 or rounding != "floor":
            return None
        return dividend, divisor

    def _choice(self, arguments: dict[str, object]) -> Bounds | None:
        condition, held, other = arguments["condition"], arguments["self"], arguments["other"]
        if self._number(held) == 0 and self.hides(other) and isinstance(condition, fx.Node):
            return self.read(condition)
        if self._number(other) == 0 and self.hides(held):
            return self.negated(condition)
        return None

    def negated(self, condition: object) -> Bounds | None:
        inner = self.read(condition) if isinstance(condition, fx.Node) and is_boolean(condition) else None
        if inner is None or len(inner) != 1 or inner[0].chunk is not None:  # the opposite of several conditions is no conjunction
            return None
        return _each(inner, lambda grid: algebra.add(algebra.scale(grid, -1), algebra.uniform(algebra.constant(-1))))

    def _integers(self, value: object) -> Grid | None:
        if isinstance(value, int) and not isinstance(value, bool):
            return algebra.uniform(algebra.constant(value))
        if isinstance(value, fx.Node) and self._values.is_integer(value):
            return self._values.grid(value)
        return None

    def hides(self, value: object) -> bool:
        number = self._number(value)
        return number is not None and number <= _HIDDEN

    def _number(self, value: object) -> float | None:
        """The one number a tensor is filled with, if it is."""
        if isinstance(value, int | float):
            return float(value)
        if not isinstance(value, fx.Node):
            return None
        name = str(value.target)
        if name in rules.ZEROS | rules.ONES:
            return float(name in rules.ONES)
        if value.name in self._program.constants:
            tensor = self._program.constants[value.name]
            return float(tensor.reshape(-1)[0]) if tensor.numel() == 1 else None
        if name in rules.CONSTANTS:
            arguments = bind(value)
            return self._number(arguments.get("fill_value", arguments.get("s")))
        return self._number(_moved_operand(value)) if name in rules.LAYOUT else None


def _moved_operand(node: fx.Node) -> object:
    """What a layout operator moves (prims call it `a`)."""
    arguments = bind(node)
    return arguments.get("self", arguments.get("a"))


def _each(bounds: Bounds, change: Callable[[Grid], Grid | None]) -> Bounds | None:
    """The bounds with `change` done to their grids, unless one is lost on the way: half a conjunction would see too much."""
    found = tuple(Bound(grid, bound.chunk) for bound in bounds if (grid := change(bound.grid)) is not None)
    return found if len(found) == len(bounds) else None

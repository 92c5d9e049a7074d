"""Where the rows, cells and queries of an attention lie in what is made of a cache, of scores and of weights.

A mask speaks of cells by their place along the last axis of scores. That means something only as long as nobody on the way has cut,
repeated or turned around the axis they lie along; which axis that is may change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import sympy
import torch
from torch import Tensor, fx

from compiler_service.proof import rules
from compiler_service.proof.evaluate import bind

_FLATTEN = frozenset(name for name, rule in rules.TABLE.items() if rule is rules.TABLE["aten.view.default"])
_SPLITS = frozenset(["aten.split.Tensor", "aten.split_with_sizes.default", "aten.chunk.default"])
_UNBIND, _CAT, _SELECT = "aten.unbind.int", "aten.cat.default", "aten.select.int"
_GETITEM = "<built-in function getitem>"
_FACTORS = {
    # product -> its left and its right factor
    "aten.matmul.default": ("self", "other"),
    "aten.bmm.default": ("self", "mat2"),
    "aten.mm.default": ("self", "mat2"),
    "aten.addmm.default": ("mat1", "mat2"),
    "aten.baddbmm.default": ("batch1", "batch2"),
}


class Kind(StrEnum):
    ROW = "row"
    CELL = "cell"
    QUERY = "query"


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a tensor, as the factors its size is the product of, slowest first; a kind's number counts along its factor.

    Not `whole`: something else follows behind them, as sinks do behind the cells.
    """

    factors: tuple[tuple[Kind | None, sympy.Expr], ...] = ()
    whole: bool = True

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return tuple(kind for kind, _ in self.factors if kind is not None)

    @property
    def size(self) -> sympy.Expr:
        return sympy.prod([size for _, size in self.factors])


Place = tuple[Axis, ...]


def of_kinds(value: Tensor, kinds: Sequence[Kind | None]) -> Place:
    """A tensor whose axes count these."""
    return tuple(_axis(size, kind) for size, kind in zip(_sizes(value), kinds, strict=True))


def lies_straight(place: Place) -> bool:
    """Whether scores are `[.., queries, cells]`, with nothing but more to weigh behind the cells, of rows in order."""
    return _counts(place[-1], Kind.CELL) and (_counts(place[-2], Kind.QUERY) or not place[-2].factors) and _has_rows_first(place)


def holds_cells(place: Place, axis: int) -> bool:
    """Whether `axis` counts the cells and nothing else, of rows in order."""
    return _counts(place[axis], Kind.CELL) and place[axis].whole and _has_rows_first(place)


def _counts(axis: Axis, kind: Kind) -> bool:
    return [found for found, _ in axis.factors] == [kind]


def _has_rows_first(place: Place) -> bool:
    """Rows may share the first axis with what each of them has several of."""
    rows = [(at, axis.kinds) for at, axis in enumerate(place) if Kind.ROW in axis.kinds]
    return not rows or (rows == [(0, (Kind.ROW,))] and place[0].factors[0][0] is Kind.ROW)


def through(node: fx.Node, operand: fx.Node, place: Place) -> Place | None:
    """Where in the value of `node` lies what `operand` has at `place`; None where an axis that counts is cut, repeated or mixed.

    `node` is an operator of rules.SCORES, rules.PARTS or rules.PROJECTIONS.
    """
    name, value = str(node.target), node.meta["val"]
    if name == _GETITEM:
        return tuple(axis if axis.kinds else _axis(size) for axis, size in zip(place, _sizes(value), strict=True))
    arguments = bind(node)
    if name in _SPLITS or name in (_UNBIND, _SELECT):
        dim = _dim(arguments, len(place))
        if place[dim].kinds:
            return None
        return (*place[:dim], *((Axis(),) if name in _SPLITS else ()), *place[dim + 1 :])
    if name in rules.PROJECTIONS:
        return None if place[-1].kinds else (*place[:-1], _axis(_sizes(value)[-1]))
    sizes = _sizes(value)
    if name in _FLATTEN:
        return _regrouped(place, sizes)
    if name in rules.AXIS_MOVES or name == "aten.numpy_T.default":
        return _moved(arguments, place)
    if name == "aten.unsqueeze.default":
        dim = _dim(arguments, len(place) + 1)
        return (*place[:dim], Axis(), *place[dim:])
    if name == _CAT:
        return _put_together(arguments, operand, place, sizes)
    if name == rules.SLICE:
        return _sliced(arguments, place, sizes)
    return _stretched(place, _sizes(operand.meta["val"]), sizes)


def of_scores(product: fx.Node, keys: fx.Node, place: Place) -> Place | None:
    """Where a product of queries and `keys` has queries and cells; None where it is no such product."""
    name, arguments, sizes = str(product.target), bind(product), _sizes(product.meta["val"])
    query = _axis(sizes[-2], Kind.QUERY) if len(sizes) > 1 else Axis()
    if name == "aten.einsum.default":
        letters = _letters(arguments, keys)
        if letters is None:
            return None
        mine, _, out = letters
        found = [place[mine.index(letter)] if letter in mine else _axis(size) for letter, size in zip(out, sizes, strict=True)]
        lost = [axis for letter, axis in zip(mine, place, strict=True) if letter not in out and axis.kinds]
        return None if lost or len(found) < 2 or found[-2].kinds else (*found[:-2], query, found[-1])
    if not _is_right_factor(product, keys) or place[-2].kinds:
        return None
    batch = _stretched(place[:-2], _sizes(keys.meta["val"])[:-2], sizes[:-2])
    return None if batch is None else (*batch, query, place[-1])


def weighs(product: fx.Node, values: fx.Node, place: Place) -> fx.Node | None:
    """The weights of a product that weighs the cells of `values`, cell by cell along the weights' last axis; None for any other."""
    arguments = bind(product)
    if str(product.target) == "aten.einsum.default":
        letters = _letters(arguments, values)
        tensors = arguments["tensors"]
        if letters is None or not isinstance(tensors, list | tuple):
            return None
        mine, others, out = letters
        axis = next((axis for axis in range(len(place)) if place[axis].kinds == (Kind.CELL,)), None)
        aligned = axis is not None and mine[axis] not in out and others.endswith(mine[axis]) and holds_cells(place, axis)
        (weights,) = [tensor for tensor in tensors if tensor is not values]
        return weights if aligned else None
    if not _is_right_factor(product, values) or not holds_cells(place, -2):
        return None
    left = arguments[_FACTORS[str(product.target)][0]]
    return left if isinstance(left, fx.Node) else None


def of_weights(softmax: fx.Node, cells: sympy.Expr) -> Place:
    """A softmax over scores that lie straight: as many cells as `cells` says, and then what else is weighed."""
    *batch, queries, last = _sizes(softmax.meta["val"])
    return (
        *(_axis(size) for size in batch),
        _axis(queries, Kind.QUERY),
        Axis(((Kind.CELL, cells),), whole=last == cells),
    )


def cells_of(place: Place) -> sympy.Expr:
    return next(size for axis in place for kind, size in axis.factors if kind is Kind.CELL)


def _axis(size: sympy.Expr, kind: Kind | None = None) -> Axis:
    """Of one place nothing can be out of order, so its kind does not matter."""
    return Axis() if size == 1 and kind is not Kind.CELL else Axis(((kind, size),))


def _sizes(value: Tensor) -> list[sympy.Expr]:
    return [size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size) for size in value.shape]


def _dim(arguments: dict[str, object], rank: int) -> int:
    dim = arguments.get("dim", 0)
    assert isinstance(dim, int)
    return dim % max(rank, 1)


def _moved(arguments: dict[str, object], place: Place) -> Place:
    order = list(range(len(place)))
    first, second = (arguments.get(f"dim{end}", arguments.get(f"axis{end}")) for end in (0, 1))
    if isinstance(dims := arguments.get("dims"), list | tuple):
        order = [axis % len(place) for axis in dims]
    elif isinstance(first, int) and isinstance(second, int):
        order[first], order[second] = order[second], order[first]
    else:
        order.reverse()
    return tuple(place[axis] for axis in order)


def _stretched(place: Place, sizes: Sequence[sympy.Expr], wanted: Sequence[sympy.Expr]) -> Place | None:
    """Right aligned; axes that count nothing may become longer."""
    missing = len(wanted) - len(place)
    if missing < 0:
        return None
    found = [_axis(size) for size in wanted[:missing]]
    for axis, own, size in zip(place, sizes, wanted[missing:], strict=True):
        if own != size and axis.kinds:
            return None
        found.append(axis if own == size else _axis(size))
    return tuple(found)


def _put_together(arguments: dict[str, object], operand: fx.Node, place: Place, sizes: Sequence[sympy.Expr]) -> Place | None:
    """Parts side by side; behind the cells there may be more, before them not."""
    parts, dim = arguments["tensors"], _dim(arguments, len(place))
    if not place[dim].kinds:
        return (*place[:dim], _axis(sizes[dim]), *place[dim + 1 :])
    if not isinstance(parts, list | tuple) or parts[0] is not operand or operand in parts[1:]:
        return None
    return (*place[:dim], Axis(place[dim].factors, whole=False), *place[dim + 1 :])


def _sliced(arguments: dict[str, object], place: Place, sizes: Sequence[sympy.Expr]) -> Place | None:
    dim = _dim(arguments, len(place))
    axis, size = place[dim], sizes[dim]
    if not axis.kinds:
        kept = _axis(size)
    elif axis.size == size and arguments.get("start") in (None, 0) and arguments["step"] == 1:
        kept = Axis(axis.factors)
    else:
        return None
    return (*place[:dim], kept, *place[dim + 1 :])


def _regrouped(place: Place, sizes: Sequence[sympy.Expr]) -> Place | None:
    """The same elements in the same order under another shape; what counts stays in one piece."""
    if not all(axis.whole for axis in place):
        return None
    left: list[tuple[Kind | None, sympy.Expr]] = []
    for kind, size in (factor for axis in place for factor in axis.factors):
        if kind is None and left and left[-1][0] is None:
            left[-1] = (None, left[-1][1] * size)
        else:
            left.append((kind, size))
    left.reverse()
    found = []
    for size in sizes:
        factors, needed = [], size
        while needed != 1:
            if not left:
                return None
            kind, own = left.pop()
            if (rest := _quotient(needed, own)) is not None:
                factors.append((kind, own))
                needed = rest
            elif kind is None and (rest := _quotient(own, needed)) is not None:
                factors.append((None, needed))
                left.append((None, rest))
                needed = sympy.Integer(1)
            else:
                return None
        found.append(Axis(tuple(factors)))
    return None if left else tuple(found)


def _quotient(size: sympy.Expr, by: sympy.Expr) -> sympy.Expr | None:
    """`size / by` if that is a whole number whatever the sizes are."""
    if size == by:
        return sympy.Integer(1)
    found = size / by
    return found if found.is_integer and sympy.fraction(found)[1] == 1 else None


def _is_right_factor(product: fx.Node, operand: fx.Node) -> bool:
    names = _FACTORS.get(str(product.target))
    if names is None:
        return False
    left, right = (bind(product)[name] for name in names)
    return right is operand and left is not operand


def _letters(arguments: dict[str, object], operand: fx.Node) -> tuple[str, str, str] | None:
    """Letters of `operand`, of the other factor and of the outcome of an einsum of two factors."""
    equation, tensors = arguments["equation"], arguments["tensors"]
    assert isinstance(equation, str)
    assert isinstance(tensors, list | tuple)
    factors, arrow, out = equation.replace(" ", "").partition("->")
    letters = factors.split(",")
    if not arrow or "." in equation or len(tensors) != 2 or tensors[0] is tensors[1]:
        return None
    mine, others = letters if tensors[0] is operand else reversed(letters)
    return None if len(set(mine)) != len(mine) else (mine, others, out)

"""One pass over a functional graph: what each integer tensor and each size is, in the index algebra."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import sympy
import torch
from torch import Tensor, fx

from compiler_service.proof import algebra
from compiler_service.proof.algebra import Grid, Linear
from compiler_service.proof.program import Program
from compiler_service.proof.rules import TABLE

INDEX_DTYPES = (torch.int32, torch.int64)
MAX_CONSTANT_ELEMENTS = 1 << 20
"""Constants beyond this are not read by value: no cache is that long, and reading is linear."""


class _Unsupported(Exception):
    """An operand a rule cannot take; the message says which."""


class Values:
    """Values of the nodes of one program. `reason(source)` tells why a term is opaque."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._grids: dict[fx.Node, Grid] = {}
        self._symbols: dict[sympy.Symbol, Linear] = {}
        self._expressions: dict[sympy.Expr, Linear] = {}
        self._reasons: dict[str, str] = {}
        self._tables: dict[str, tuple[int, ...]] = {}
        for node in program.graph.nodes:
            self._visit(node)

    def grid(self, node: fx.Node) -> Grid:
        """The value of a tensor or scalar node; opaque where it is no affine integer tensor."""
        found = self._grids.get(node)
        return found if found is not None else self._opaque(node, "is not an integer tensor")

    def shape(self, node: fx.Node) -> tuple[Linear, ...]:
        """Traced shape of a tensor node."""
        return tuple(self.linear(size) for size in node.meta["val"].shape)

    def moved(self, node: fx.Node, operand: Grid) -> Grid | None:
        """`operand` through the layout operator of `node`, in place of the tensor that the node has there."""
        try:
            result = TABLE[str(node.target)](_Call(self, node, operand))
        except _Unsupported:
            return None
        return result if result is not None and result.shape == self.shape(node) else None

    def is_integer(self, node: fx.Node) -> bool:
        """Whether a node is a tensor or scalar of integers the algebra computes with."""
        return node in self._grids

    def reason(self, source: str) -> str:
        return self._reasons.get(source, f"{source} is an input")

    def table(self, source: str) -> tuple[int, ...] | None:
        """Values of a rank-1 constant that is no ascending or descending run, for a counterexample."""
        return self._tables.get(source)

    def linear(self, value: object) -> Linear:
        """A Python int or SymInt as a Linear over size symbols and the tensor elements they were read from."""
        if isinstance(value, int):
            return algebra.constant(value)
        if not isinstance(value, torch.SymInt):
            raise _Unsupported(f"{value!r} is no integer")
        return self._of_expression(value.node.expr)

    def scalar(self, value: object) -> Linear | None:
        """An argument that should be one integer: a Python int, a size, or a rank-0 node; None for anything else."""
        if isinstance(value, fx.Node):
            found = self.grid(value)
            return None if found.rank else found.base
        return self.linear(value) if isinstance(value, int | torch.SymInt) else None

    def _of_expression(self, expression: sympy.Expr) -> Linear:
        found = self._expressions.get(expression)
        if found is None:
            found = self._expressions[expression] = self._read_expression(expression)
        return found

    def _read_expression(self, expression: sympy.Expr) -> Linear:
        total = algebra.ZERO
        for part in sympy.Add.make_args(sympy.sympify(expression)):
            factor, rest = part.as_coeff_Mul()
            if not factor.is_Integer:
                factor, rest = sympy.Integer(1), part
            if rest == 1:
                total = total + algebra.constant(int(factor))
            elif rest in self._symbols:
                total = total + self._symbols[rest].scaled(int(factor))
            else:
                sized = bool(rest.is_nonnegative)
                term = algebra.symbol(self._shown(rest), nonnegative=sized, given=sized)
                total = total + term.scaled(int(factor))
        return total

    def _shown(self, expression: sympy.Expr) -> str:
        names = self._program.size_names
        return str(expression.xreplace({size: sympy.Symbol(name) for size, name in names.items()}))

    def _visit(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if isinstance(value, int | torch.SymInt) and not isinstance(value, bool):
            self._grids[node] = self._scalar(node, value)
        elif isinstance(value, Tensor) and value.dtype in INDEX_DTYPES:
            self._grids[node] = self._tensor(node)

    def _scalar(self, node: fx.Node, value: int | torch.SymInt) -> Grid:
        rule = TABLE.get(str(node.target))
        if rule is None or isinstance(value, int) or not isinstance(value.node.expr, sympy.Symbol):
            return algebra.uniform(self.linear(value))
        try:  # a size read out of a tensor: from here on its symbol stands for that element
            read = rule(_Call(self, node))
        except _Unsupported:
            read = None
        if read is not None:
            self._symbols[value.node.expr] = read.base
            self._expressions.clear()
        return algebra.uniform(self.linear(value))

    def _tensor(self, node: fx.Node) -> Grid:
        if node.name in self._program.constants:
            return self._constant(node, self._program.constants[node.name])
        if node.op == "placeholder":
            return self._opaque(node, "is an input")
        rule = TABLE.get(str(node.target))
        if rule is None:
            return self._opaque(node, f"is made by {node.target}, which has no rule in the index algebra")
        try:
            result = rule(_Call(self, node))
        except _Unsupported as error:
            return self._opaque(node, f"is made by {node.target}: {error}")
        if result is None:
            return self._opaque(node, f"is made by {node.target}, which is not affine for these operands")
        if result.shape != self.shape(node):
            return self._opaque(node, f"has the traced shape {_text(self.shape(node))}, its operands give {_text(result.shape)}")
        return result

    def _constant(self, node: fx.Node, tensor: Tensor) -> Grid:
        if tensor.numel() > MAX_CONSTANT_ELEMENTS:
            return self._opaque(node, f"is a constant of {tensor.numel()} elements, too many to read")
        values = tensor.reshape(-1).tolist()
        read = algebra.fill(values, list(tensor.shape))
        if read is not None:
            return read
        if tensor.ndim == 1:
            self._tables[node.name] = tuple(values)
        return self._opaque(node, f"is a constant whose values are not evenly spaced: {preview(values)}")

    def _opaque(self, node: fx.Node, reason: str) -> Grid:
        self._reasons[node.name] = f"{node.name} {reason}"
        shape = self.shape(node) if isinstance(node.meta.get("val"), Tensor) else ()
        return algebra.opaque(node.name, shape, given=node.op == "placeholder" and node.name not in self._program.constants)


class _Call:
    """The operands of one node, as `rules.Operands`."""

    def __init__(self, values: Values, node: fx.Node, operand: Grid | None = None) -> None:
        self._values = values
        self._node = node
        self._operand = operand
        self._arguments = bind(node)

    @property
    def source(self) -> str:
        return self._node.name

    @property
    def shape(self) -> tuple[Linear, ...]:
        return self._values.shape(self._node)

    def given(self, name: str) -> bool:
        return self._arguments.get(name) is not None

    def grid(self, name: str) -> Grid:
        if self._operand is not None and name in ("self", "a"):
            return self._operand
        return self._grid(self._arguments[name], name)

    def grids(self, name: str) -> Sequence[Grid]:
        return [self._grid(item, name) for item in self._list(name)]

    def any_grid(self, name: str) -> Grid:
        value = self._arguments[name]
        if not isinstance(value, fx.Node) or not isinstance(value.meta.get("val"), Tensor):
            raise _Unsupported(f"{name} is no tensor")
        return self._values.grid(value)

    def integer(self, name: str) -> int:
        return self._integer(self._arguments[name], name)

    def integers(self, name: str) -> Sequence[int]:
        return [self._integer(item, name) for item in self._list(name)]

    def scalar(self, name: str) -> Linear:
        value = self._arguments[name]
        found = self._grid(value, name)
        if found.rank:
            raise _Unsupported(f"{name} is no single integer")
        return found.base

    def _list(self, name: str) -> Sequence[object]:
        value = self._arguments[name]
        if not isinstance(value, list | tuple):
            raise _Unsupported(f"{name} is no list")
        return value

    def _grid(self, value: object, name: str) -> Grid:
        if isinstance(value, int | torch.SymInt) and not isinstance(value, bool):
            return algebra.uniform(self._values.linear(value))
        if isinstance(value, fx.Node):
            traced = value.meta.get("val")
            if (isinstance(traced, Tensor) and traced.dtype in INDEX_DTYPES) or isinstance(traced, int | torch.SymInt):
                return self._values.grid(value)
        raise _Unsupported(f"{name} is {_kind(value)}, not 32- or 64-bit integers")

    def _integer(self, value: object, name: str) -> int:
        found = self._grid(value, name)
        if found.rank or not found.base.is_constant:
            raise _Unsupported(f"{name} is not a number known at compile time")
        return found.base.const


def bind(node: fx.Node) -> dict[str, object]:
    """Arguments of a call by their names in the operator's schema, defaults included."""
    if not isinstance(node.target, torch._ops.OpOverload):
        raise ValueError(f"{node.name} calls {node.target}, which has no schema")
    names, defaults = _signature(node.target)
    return {**defaults, **dict(zip(names, node.args, strict=False)), **node.kwargs}


@lru_cache(maxsize=512)
def _signature(target: torch._ops.OpOverload) -> tuple[tuple[str, ...], dict[str, object]]:
    arguments = target._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    return tuple(argument.name for argument in arguments), defaults


def _kind(value: object) -> str:
    traced = value.meta.get("val") if isinstance(value, fx.Node) else value
    return str(traced.dtype) if isinstance(traced, Tensor) else type(traced).__name__


def _text(shape: Sequence[Linear]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def preview(values: Sequence[int]) -> str:
    """The first few of a long list of integers."""
    return ", ".join(map(str, values[:6])) + (", .." if len(values) > 6 else "")

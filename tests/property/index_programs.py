"""Random programs that write one cache: index expressions over every operator of the algebra, and near misses.

A program is an fx graph as torch.export makes them (aten operators, traced shapes in `meta["val"]`), built directly because
exporting takes a thousand times as long. Sizes are `c + k * n + r * rows`, with the query length `n` and the number of
rows symbolic.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import SymInt, Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

aten = torch.ops.aten
I64, I32, F32, BOOL = torch.int64, torch.int32, torch.float32, torch.bool
HEADS, CELLS, HEAD_DIM = 2, 64, 2


@dataclass(frozen=True, slots=True)
class Size:
    """`const + n * query_len + rows * num_rows`."""

    const: int = 0
    n: int = 0
    rows: int = 0

    def __add__(self, other: int) -> Size:
        return Size(self.const + other, self.n, self.rows)

    def at(self, n: int, rows: int) -> int:
        return self.const + self.n * n + self.rows * rows


N, ROWS, ONE = Size(n=1), Size(rows=1), Size(1)
Shape = tuple[Size, ...]


class World:
    """The symbols of all programs and one traced tensor for each shape and type, made once."""

    def __init__(self) -> None:
        self.env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.env)
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
        self.rows, self.n = self.mode.from_tensor(torch.empty(7, 11), symbolic_context=context).shape
        self.read = self.env.create_unbacked_symint()

    @cache  # noqa: B019  # there is one world, for the life of the process
    def size(self, size: Size) -> int | SymInt:
        return size.const + size.n * self.n + size.rows * self.rows

    @cache  # noqa: B019
    def tensor(self, shape: Shape, dtype: torch.dtype) -> Tensor:
        with self.mode:
            return torch.empty([self.size(size) for size in shape], dtype=dtype)


@cache
def world() -> World:
    return World()


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the program being built."""

    node: fx.Node
    shape: Shape
    dtype: torch.dtype


@dataclass(slots=True)
class IndexProgram:
    """A finished program. `update_axes[a]` is the update's axis along axis `a` of the cache; `index` holds the cells."""

    graph: fx.Graph
    cache: Value
    update: Value
    update_axes: tuple[int | None, ...]
    written: fx.Node
    index: Value | None
    constants: dict[str, Tensor]
    inputs: dict[str, Value]
    trail: list[str]


@dataclass(slots=True)
class Builder:
    """Adds nodes with traced values. `trail` records the choices, for messages."""

    rng: random.Random
    graph: fx.Graph = field(default_factory=fx.Graph)
    inputs: dict[str, Value] = field(default_factory=dict)
    constants: dict[str, Tensor] = field(default_factory=dict)
    trail: list[str] = field(default_factory=list)
    _sizes: dict[Size, fx.Node] = field(default_factory=dict)

    def placeholder(self, name: str, shape: Shape, dtype: torch.dtype) -> Value:
        if name not in self.inputs:
            # Placeholders come first in a graph, whenever a program finds out that it needs one.
            first = next(iter(self.graph.nodes), None)
            if first is None or first.op == "root":
                node = self.graph.placeholder(name)
            else:
                with self.graph.inserting_before(first):
                    node = self.graph.placeholder(name)
            node.meta["val"] = world().tensor(shape, dtype)
            self.inputs[name] = Value(node, shape, dtype)
        return self.inputs[name]

    def constant(self, tensor: Tensor) -> Value:
        name = f"c_lifted_tensor_{len(self.constants)}"
        value = self.placeholder(name, tuple(Size(size) for size in tensor.shape), tensor.dtype)
        self.constants[name] = tensor
        return value

    def call(self, op: Callable[..., Any], args: Sequence[Any], shape: Shape, result: torch.dtype, **kwargs: Any) -> Value:
        node = self.graph.call_function(op, tuple(_unwrap(arg) for arg in args), kwargs)
        node.meta["val"] = world().tensor(shape, result)
        return Value(node, shape, result)

    def size(self, size: Size) -> int | fx.Node:
        """A size as an argument: an int, or the node that computes it."""
        if not (size.n or size.rows):
            return size.const
        if size not in self._sizes:
            tokens = self.placeholder("tokens", (ROWS, N), I64)
            total: fx.Node | int = size.const
            for axis, factor, symbol in ((1, size.n, world().n), (0, size.rows, world().rows)):
                if factor:
                    part = self._symbolic(aten.sym_size.int, (tokens.node, axis), symbol)
                    part = part if factor == 1 else self._symbolic(operator.mul, (factor, part), factor * symbol)
                    total = part if total == 0 else self._symbolic(operator.add, (part, total), world().size(size))
            assert isinstance(total, fx.Node)
            self._sizes[size] = total
        return self._sizes[size]

    def read_scalar(self) -> fx.Node:
        """The input `p` as a size, the way `p.item()` traces."""
        return self._symbolic(aten._local_scalar_dense.default, (self.p.node,), world().read)

    def _symbolic(self, op: Callable[..., Any], args: tuple[Any, ...], value: int | SymInt) -> fx.Node:
        node = self.graph.call_function(op, args)
        node.meta["val"] = value
        return node

    @property
    def p(self) -> Value:
        return self.placeholder("p", (), I64)

    @property
    def p_one(self) -> Value:
        return self.placeholder("p_one", (ONE,), I64)

    @property
    def p_rows(self) -> Value:
        return self.placeholder("p_rows", (ROWS,), I32)

    @property
    def positions(self) -> Value:
        """Anything at all, one for each token."""
        return self.placeholder("positions", (N,), I64)

    def small(self) -> int:
        return self.rng.choice((0, 1, 1, 2, 3, 5))

    def pick(self, steps: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
        step = self.rng.choice(steps)
        self.trail.append(step.__name__)
        return step


def _unwrap(arg: Any) -> Any:
    if isinstance(arg, Value):
        return arg.node
    return [_unwrap(item) for item in arg] if isinstance(arg, list | tuple) else arg

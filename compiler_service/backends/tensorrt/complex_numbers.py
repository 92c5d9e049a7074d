"""Rewrite complex numbers as pairs of real ones: TensorRT has none, and some models turn keys and queries by multiplying with them.

    c = view_as_complex(x)    =>    x[.., 0], x[.., 1]
    c = polar(r, a)           =>    r * cos(a), r * sin(a)
    c = a * b                 =>    re(a) re(b) - im(a) im(b), re(a) im(b) + im(a) re(b)
    x = view_as_real(c)       =>    the two parts side by side

Operators that move numbers about move both parts. Left alone: everything real. Refused (UnsupportedModel): any other operator.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from compiler_service.export.program import DecoderProgram
from compiler_service.lowering.rewrite import rebuild
from shared.bindings import INPUT_IDS
from shared.errors import UnsupportedModel

aten = torch.ops.aten
_MOVES = frozenset(
    {
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.view.default,
        aten._reshape_copy.default,
        aten.expand.default,
        aten.permute.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.clone.default,
        aten.alias.default,
    }
)

Parts = tuple[fx.Node, fx.Node]
"""Real and imaginary part."""


def without_complex_numbers(program: DecoderProgram) -> DecoderProgram:
    """The same step in real numbers."""
    graph = copy.deepcopy(program.program.graph)
    if any(_is_complex(node) for node in graph.nodes):
        tokens = next(node for node in graph.nodes if node.name == program.placeholder(INPUT_IDS))
        _Rewrite(graph, tokens.meta["val"].fake_mode).run()
        graph.eliminate_dead_code()
    return replace(program, program=rebuild(program.program, graph, program.program.graph_signature))


class _Rewrite:
    def __init__(self, graph: fx.Graph, mode: Any) -> None:
        self._graph, self._mode = graph, mode
        self._parts: dict[fx.Node, Parts] = {}

    def run(self) -> None:
        for node in list(self._graph.nodes):
            with self._graph.inserting_before(node):
                if node.target is aten.view_as_real.default:
                    node.replace_all_uses_with(self._side_by_side(self._parts[node.args[0]]))
                elif _is_complex(node):
                    self._parts[node] = self._parts_of(node)

    def _parts_of(self, node: fx.Node) -> Parts:
        if node.target is aten.view_as_complex.default:
            axis = node.args[0].meta["val"].dim() - 1  # type: ignore[union-attr]  # by its schema, as below
            return self._call(aten.select.int, node.args[0], axis, 0), self._call(aten.select.int, node.args[0], axis, 1)
        if node.target is aten.polar.default:
            radius, angle = node.args
            re, im = (self._call(op, angle) for op in (aten.cos.default, aten.sin.default))
            return self._product(radius, re), self._product(radius, im)
        if node.target is aten.mul.Tensor:
            return self._complex_product(*node.args)
        if node.target in _MOVES:
            moved, *rest = node.args
            re, im = (self._call(node.target, part, *rest, **node.kwargs) for part in self._parts[moved])  # type: ignore[index]
            return re, im
        raise UnsupportedModel(f"{node} ({node.target}) computes with complex numbers, which TensorRT does not have")

    def _complex_product(self, left: Any, right: Any) -> Parts:
        if left not in self._parts or right not in self._parts:
            factor, (re, im) = (right, self._parts[left]) if left in self._parts else (left, self._parts[right])
            return self._product(re, factor), self._product(im, factor)
        (a, b), (c, d) = self._parts[left], self._parts[right]
        re = self._call(aten.sub.Tensor, self._product(a, c), self._product(b, d))
        return re, self._call(aten.add.Tensor, self._product(a, d), self._product(b, c))

    def _product(self, left: Any, right: Any) -> fx.Node:
        return self._call(aten.mul.Tensor, left, right)

    def _side_by_side(self, parts: Parts) -> fx.Node:
        axis = parts[0].meta["val"].dim()
        return self._call(aten.cat.default, [self._call(aten.unsqueeze.default, part, axis) for part in parts], axis)

    def _call(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = self._graph.call_function(op, args, kwargs)
        with self._mode:
            node.meta["val"] = op(*fx.map_arg(args, lambda n: n.meta["val"]), **kwargs)
        return node


def _is_complex(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype.is_complex

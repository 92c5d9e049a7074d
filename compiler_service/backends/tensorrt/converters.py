"""Ordinary operators that Torch-TensorRT's registry converts for fixed sizes only, or not at all.

A converter takes (layers, node, arguments, keywords) and answers NotImplemented for a case that is not its own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import fx

from compiler_service.backends.tensorrt.layers import DTYPES, Layers

aten = torch.ops.aten
Converter = Callable[[Layers, fx.Node, tuple[Any, ...], dict[str, Any]], Any]


def _empty(layers: Layers, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Zeros: whoever reads a cell of it has written it before."""
    fixed = all(isinstance(size, int) for size in args[0])
    return torch.zeros(args[0], dtype=node.meta["val"].dtype) if fixed else NotImplemented


def _quotient(layers: Layers, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An integer by a number, as the fraction it is; the registry's converter would round it."""
    dividend, divisor = args
    dtype = node.meta["val"].dtype
    if not isinstance(divisor, int | float) or node.all_input_nodes[0].meta["val"].dtype.is_floating_point:
        return NotImplemented
    by = layers.constant(np.full((1,) * len(dividend.shape), divisor, dtype=np.float32), DTYPES[dtype])
    return layers.elementwise("DIV", layers.cast(dividend, DTYPES[dtype]), by)


def _gather(layers: Layers, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    value, axis, index = args[:3]
    return layers.gather_elements(value, axis, index)


def _largest(layers: Layers, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    value, axis, *keep_axis = args
    if axis % len(value.shape) != len(value.shape) - 1:
        return NotImplemented
    return layers.largest(value, keep_axis=bool(keep_axis and keep_axis[0]))


def _item(layers: Layers, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0][args[1]] if isinstance(args[0], tuple) else NotImplemented


OWN: Mapping[object, Converter] = {
    aten.empty.memory_format: _empty,
    aten.div.Tensor: _quotient,
    aten.gather.default: _gather,
    aten.max.dim: _largest,
    operator.getitem: _item,
}


def with_its_end(node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a slice_scatter. An open-ended slice arrives as one that ends at 2**63 - 1, which the registry's converter
    counts as no cells at all."""
    defaults: tuple[Any, ...] = (0, None, None, 1)
    destination, rows, axis, start, end, step = [*args, *defaults[len(args) - 2 :]]
    size = node.args[0].meta["val"].shape[axis]  # type: ignore[union-attr]  # a write's first argument is a tensor
    if end is None or (isinstance(size, int) and end > size):
        end = size
    return (destination, rows, axis, start, end, step)

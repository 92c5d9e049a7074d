"""Writes without a proof, done on a copy of the cache: slow, and right for any index.

Torch-TensorRT's own converters of these operators take a step of 2 for a step of 1, or refuse a dynamic length; TensorRT's scatter
takes every cell by its number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorrt as trt
import torch
from torch import Tensor, fx

from compiler_service.backends.tensorrt.layers import ITensor, Layers
from shared.errors import UnsupportedModel

COPIED_WRITES = frozenset({"aten.index_copy.default", "aten.slice_scatter.default"})


def copy_and_write(layers: Layers, node: fx.Node, args: tuple[Any, ...]) -> ITensor:
    """The new content of the cache `args[0]`. UnsupportedModel for bounds that only a step decides."""
    traced = node.args[0].meta["val"]  # type: ignore[union-attr]  # a write's first argument is a tensor
    if node.target is torch.ops.aten.index_copy.default:
        cache, axis, index, rows = args
    else:
        cache, rows, *given = args
        defaults: tuple[Any, ...] = (0, None, None, 1)
        axis, start, end, step = [*given, *defaults[len(given) :]]
        size = traced.shape[axis]
        if not all(bound is None or isinstance(bound, int) for bound in (start, end)) or not isinstance(size, int):
            raise UnsupportedModel(f"{node} writes from {start} to {end}, which only a step decides; a copy needs fixed bounds")
        index = np.arange(size, dtype=np.int32)[slice(start, end, step)]
    axis %= traced.dim()
    return _scatter(layers, cache, axis, _as_tensor(layers, index), rows)


def _as_tensor(layers: Layers, index: Any) -> ITensor:
    if isinstance(index, Tensor):
        index = index.numpy().astype(np.int32)
    tensor = layers.constant(index) if isinstance(index, np.ndarray) else index
    return layers.cast(tensor, trt.int32)


def _scatter(layers: Layers, cache: ITensor, axis: int, index: ITensor, rows: ITensor) -> ITensor:
    """`cache` with `rows` in the cells `index [n]` of `axis`; the index is read once for every row, head and element."""
    rank = len(cache.shape)
    along = layers.reshape(index, tuple(-1 if k == axis else 1 for k in range(rank)))
    spread = layers.network.add_slice(along, (0,) * rank, (1,) * rank, tuple(int(k == axis) for k in range(rank)))
    spread.set_input(2, layers.shape_of(rows))
    layer = layers.network.add_scatter(cache, layers.output(spread, "index"), rows, trt.ScatterMode.ELEMENT)
    layer.axis = axis
    return layers.output(layer, "copy")

"""TensorRT layers as functions of tensors, for what our own converters emit. Every layer is named after the node it serves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorrt as trt
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.errors import BuildFailed

ITensor = Any
"""The bindings are untyped."""
DTYPES = {
    torch.float32: trt.float32,
    torch.float16: trt.float16,
    torch.bfloat16: trt.bfloat16,
    torch.int32: trt.int32,
}


@dataclass(slots=True)
class Layers:
    """Adds layers to `network` under names that begin with `prefix`. `kept` holds constants until the network is built."""

    network: Any
    kept: list[Any]
    prefix: str = ""
    _count: int = 0

    def constant(self, values: NDArray[Any], dtype: Any = None) -> ITensor:
        """`values` as int32 or float32, cast to `dtype` (a trt.DataType) if it is another."""
        array = np.ascontiguousarray(values)
        out = self.output(self.network.add_constant(array.shape, trt.Weights(array)), "constant")
        self.kept.append(array)  # the builder reads the values when it builds, not here
        return out if dtype is None or out.dtype == dtype else self.cast(out, dtype)

    def weight(self, tensor: Tensor) -> ITensor:
        """A constant of any element type TensorRT has; `tensor` lies on the host."""
        held = tensor.contiguous()
        values = trt.Weights(DTYPES[held.dtype], held.data_ptr(), held.numel())
        self.kept.append(held)
        return self.output(self.network.add_constant(tuple(held.shape), values), "weight")

    def elementwise(self, operation: str, left: ITensor, right: ITensor) -> ITensor:
        layer = self.network.add_elementwise(left, right, getattr(trt.ElementWiseOperation, operation))
        return self.output(layer, operation.lower())

    def unary(self, operation: str, value: ITensor) -> ITensor:
        return self.output(self.network.add_unary(value, getattr(trt.UnaryOperation, operation)), operation.lower())

    def tanh(self, value: ITensor) -> ITensor:
        return self.output(self.network.add_activation(value, trt.ActivationType.TANH), "tanh")

    def cast(self, value: ITensor, dtype: Any) -> ITensor:
        return value if value.dtype == dtype else self.output(self.network.add_cast(value, dtype), "cast")

    def select(self, condition: ITensor, then: ITensor, otherwise: ITensor) -> ITensor:
        return self.output(self.network.add_select(condition, then, otherwise), "select")

    def reduce(self, operation: str, value: ITensor, axis: int) -> ITensor:
        """Over `axis`, which stays with size 1."""
        layer = self.network.add_reduce(value, getattr(trt.ReduceOperation, operation), 1 << axis, True)
        return self.output(layer, operation.lower())

    def matmul(self, left: ITensor, right: ITensor, *, transpose_right: bool = False) -> ITensor:
        right_op = trt.MatrixOperation.TRANSPOSE if transpose_right else trt.MatrixOperation.NONE
        return self.output(self.network.add_matrix_multiply(left, trt.MatrixOperation.NONE, right, right_op), "matmul")

    def reshape(self, value: ITensor, shape: Sequence[int], *, permute: Sequence[int] | None = None) -> ITensor:
        """Permute, then reshape; in `shape`, 0 keeps the permuted axis's size and one -1 takes what remains."""
        layer = self.network.add_shuffle(value)
        if permute is not None:
            layer.first_transpose = tuple(permute)
        layer.reshape_dims = tuple(shape)
        return self.output(layer, "reshape")

    def shape_of(self, value: ITensor) -> ITensor:
        """int64 `[rank]`, at run time."""
        return self.output(self.network.add_shape(value), "shape")

    def axis_size(self, value: ITensor, axis: int) -> ITensor:
        """int64 `[1]`: the size of `axis` at run time."""
        return self.output(self.network.add_slice(self.shape_of(value), (axis,), (1,), (1,)), "size")

    def gather(self, value: ITensor, rows: ITensor) -> ITensor:
        """Slices of axis 0 by number; the shape of `rows` takes the place of that axis."""
        return self.output(self.network.add_gather(value, rows, 0), "gather")

    def gather_elements(self, value: ITensor, axis: int, index: ITensor) -> ITensor:
        """One element of `value` along `axis` for each of `index`, which has its rank."""
        layer = self.network.add_gather_v2(value, self.cast(index, trt.int32), trt.GatherMode.ELEMENT)
        layer.axis = axis % len(value.shape)
        return self.output(layer, "gather")

    def largest(self, value: ITensor, *, keep_axis: bool) -> tuple[ITensor, ITensor]:
        """The largest element along the last axis, and its number."""
        axis = len(value.shape) - 1
        layer = self.network.add_topk(value, trt.TopKOperation.MAX, 1, 1 << axis)
        both = (self.output(layer, "largest"), layer.get_output(1))
        return both if keep_axis else tuple(self.reshape(found, (0,) * axis) for found in both)

    def concat(self, parts: Sequence[ITensor]) -> ITensor:
        return self.output(self.network.add_concatenation(list(parts)), "concat")

    def output(self, layer: Any, what: str) -> ITensor:
        """The only output of `layer`; BuildFailed if TensorRT did not accept it."""
        name = f"{self.prefix}:{what}{self._count}"
        self._count += 1
        if layer is None:
            raise BuildFailed(f"TensorRT did not accept the layer {name}")
        layer.name = name
        return layer.get_output(0)

"""Which torch operator is which operation of the index algebra: the only place that knows operator names.

Names are those of torch 2.14, as they stand before decomposition (`aten.to.dtype`, `aten.transpose.int`) and after it
(`aten._to_copy.default`, `aten.permute.default`). An operator that is not here makes a new opaque tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from compiler_service.proof import algebra
from compiler_service.proof.algebra import ZERO, Grid, Linear


class Operands(Protocol):
    """What a rule may ask of the call it describes. Anything that is not what was asked for ends the rule as unsupported."""

    @property
    def source(self) -> str:
        """Name of the node, for new opaque terms."""

    @property
    def shape(self) -> tuple[Linear, ...]:
        """Shape of the result, as traced."""

    def grid(self, name: str) -> Grid:
        """An integer tensor (or scalar, as rank 0)."""

    def grids(self, name: str) -> Sequence[Grid]:
        """A list of integer tensors."""

    def any_grid(self, name: str) -> Grid:
        """A tensor of any dtype, opaque if it is not integer."""

    def integer(self, name: str) -> int:
        """A Python int."""

    def integers(self, name: str) -> Sequence[int]:
        """A list of Python ints."""

    def scalar(self, name: str) -> Linear:
        """A Python int or a size of the program."""

    def given(self, name: str) -> bool:
        """Whether the argument is present and not None."""


Rule = Callable[[Operands], Grid | None]


def _axis(op: Operands, rank: int, name: str = "dim") -> int:
    return op.integer(name) % max(rank, 1)


def _same(op: Operands) -> Grid | None:
    return op.grid("self")


def _same_prim(op: Operands) -> Grid | None:
    return op.grid("a")


def _arange(op: Operands) -> Grid | None:
    start = op.scalar("start") if op.given("start") else ZERO
    step = op.integer("step") if op.given("step") else 1
    return algebra.iota(op.shape[0], start, step)


def _iota(op: Operands) -> Grid | None:
    return algebra.iota(op.shape[0], op.scalar("start"), op.integer("step"))


def _filled(name: str) -> Rule:
    return lambda op: algebra.uniform(op.scalar(name), op.shape)


def _filled_with(value: int) -> Rule:
    return lambda op: algebra.uniform(algebra.constant(value), op.shape)


def _sum(sign: int) -> Rule:
    def rule(op: Operands) -> Grid | None:
        alpha = op.integer("alpha") if op.given("alpha") else 1
        return algebra.add(op.grid("self"), op.grid("other"), sign * alpha)

    return rule


def _reversed_difference(op: Operands) -> Grid | None:
    alpha = op.integer("alpha") if op.given("alpha") else 1
    return algebra.add(op.grid("other"), op.grid("self"), -alpha)


def _product(op: Operands) -> Grid | None:
    left, right = op.grid("self"), op.grid("other")
    for value, factor in ((left, right), (right, left)):
        if not factor.varying_axes and factor.base.is_constant:
            return algebra.broadcast(algebra.scale(value, factor.base.const), op.shape)
    return None


def _negative(op: Operands) -> Grid | None:
    return algebra.scale(op.grid("self"), -1)


def _reshape(op: Operands) -> Grid | None:
    return algebra.reshape(op.grid("self"), op.shape)


def _expand(op: Operands) -> Grid | None:
    return algebra.broadcast(op.grid("self"), op.shape)


def _unsqueeze(op: Operands) -> Grid | None:
    value = op.grid("self")
    return algebra.insert_axis(value, op.integer("dim") % (value.rank + 1))


def _permute(op: Operands) -> Grid | None:
    value = op.grid("self")
    return algebra.permute(value, [axis % value.rank for axis in op.integers("dims")])


def _transpose(op: Operands) -> Grid | None:
    value = op.grid("self")
    order = list(range(value.rank))
    if order:
        a, b = _axis(op, value.rank, "dim0"), _axis(op, value.rank, "dim1")
        order[a], order[b] = order[b], order[a]
    return algebra.permute(value, order)


def _matrix_transpose(op: Operands) -> Grid | None:
    value = op.grid("self")
    return algebra.permute(value, list(reversed(range(value.rank))))


def _slice(op: Operands) -> Grid | None:
    value = op.grid("self")
    axis = _axis(op, value.rank)
    start = op.scalar("start") if op.given("start") else ZERO
    step = op.integer("step")
    offset = slice_start(start, value.shape[axis])
    if offset is None:  # one unknown but single offset for the whole slice
        offset = algebra.symbol(f"{op.source}.start")
    return algebra.take(value, axis, offset, step, op.shape[axis])


def slice_start(start: Linear, size: Linear) -> Linear | None:
    """First index that `[start:]` takes of an axis of `size`, by Python's rules; None where sizes decide.

    A start past the end gives an empty slice, whose first index does not matter.
    """
    if start.is_nonnegative:
        return start
    if start.is_constant and size.is_constant:
        return algebra.constant(max(0, start.const + size.const))
    return None


def _select(op: Operands) -> Grid | None:
    value = op.grid("self")
    axis = _axis(op, value.rank)
    index = op.scalar("index")
    if index.is_nonnegative:
        return algebra.select(value, axis, index)
    if index.is_constant:
        return algebra.select(value, axis, value.shape[axis] + index)
    return None


def _flip(op: Operands) -> Grid | None:
    value: Grid | None = op.grid("self")
    for axis in op.integers("dims"):
        value = value and algebra.flip(value, axis % value.rank)
    return value


def _cumsum(op: Operands) -> Grid | None:
    value = op.grid("self")
    return algebra.cumsum(value, _axis(op, value.rank))


def _cat(op: Operands) -> Grid | None:
    parts = op.grids("tensors")
    axis = op.integer("dim") % max(parts[0].rank, 1)
    return algebra.concatenate(parts, axis) if parts[0].rank else None


def _where(op: Operands) -> Grid | None:
    return algebra.choose(op.any_grid("condition"), op.grid("self"), op.grid("other"), f"{op.source}.base", op.shape)


def _item(op: Operands) -> Grid | None:
    value = op.grid("self")
    return None if value.varying_axes else algebra.uniform(value.base)


def _index(op: Operands) -> Grid | None:
    """Whatever is picked of a tensor whose elements are all the same."""
    value = op.grid("self")
    return None if value.varying_axes else algebra.uniform(value.base, op.shape)


def _copy(op: Operands) -> Grid | None:
    return algebra.broadcast(op.grid("src"), op.shape)


def _aten(names: str) -> list[str]:
    """`"add.Tensor view"` -> `["aten.add.Tensor", "aten.view.default"]`."""
    return [f"aten.{name}" if "." in name else f"aten.{name}.default" for name in names.split()]


TABLE: Mapping[str, Rule] = {
    "prims.iota.default": _iota,
    "prims.convert_element_type.default": _same_prim,
    "prims.device_put.default": _same_prim,
    **dict.fromkeys(_aten("arange arange.start arange.start_step"), _arange),
    **dict.fromkeys(_aten("full full_like new_full"), _filled("fill_value")),
    **dict.fromkeys(_aten("fill.Scalar fill.Tensor"), _filled("value")),
    **dict.fromkeys(_aten("scalar_tensor"), _filled("s")),
    **dict.fromkeys(_aten("ones ones_like new_ones"), _filled_with(1)),
    **dict.fromkeys(_aten("zeros zeros_like new_zeros"), _filled_with(0)),
    **dict.fromkeys(_aten("add.Tensor add.Scalar"), _sum(1)),
    **dict.fromkeys(_aten("sub.Tensor sub.Scalar"), _sum(-1)),
    **dict.fromkeys(_aten("rsub.Tensor rsub.Scalar"), _reversed_difference),
    **dict.fromkeys(_aten("mul.Tensor mul.Scalar"), _product),
    **dict.fromkeys(_aten("neg"), _negative),
    # Casts and copies between integer types: an operand of another type ends the rule.
    **dict.fromkeys(_aten("_to_copy to.dtype to.dtype_layout to.device to.other type_as"), _same),
    **dict.fromkeys(_aten("clone alias detach contiguous lift_fresh lift_fresh_copy positive"), _same),
    **dict.fromkeys(_aten("copy"), _copy),
    **dict.fromkeys(_aten("view reshape view_copy _unsafe_view _reshape_copy view_as reshape_as ravel"), _reshape),
    **dict.fromkeys(_aten("squeeze squeeze.dim squeeze.dims flatten.using_ints unflatten.int"), _reshape),
    **dict.fromkeys(_aten("expand expand_as expand_copy broadcast_to"), _expand),
    **dict.fromkeys(_aten("unsqueeze unsqueeze_copy"), _unsqueeze),
    **dict.fromkeys(_aten("permute permute_copy"), _permute),
    **dict.fromkeys(_aten("transpose.int swapaxes swapdims"), _transpose),
    **dict.fromkeys(_aten("t numpy_T"), _matrix_transpose),
    **dict.fromkeys(_aten("slice.Tensor slice_copy.Tensor"), _slice),
    **dict.fromkeys(_aten("select.int select_copy.int"), _select),
    **dict.fromkeys(_aten("flip"), _flip),
    **dict.fromkeys(_aten("cumsum"), _cumsum),
    **dict.fromkeys(_aten("cat"), _cat),
    **dict.fromkeys(_aten("where.self"), _where),
    **dict.fromkeys(_aten("index.Tensor"), _index),
    **dict.fromkeys(_aten("item _local_scalar_dense"), _item),
}

COPY = "aten.copy.default"
WRITES: Mapping[str, str] = {
    "aten.index_copy.default": "index_copy",
    "aten.index_put.default": "index_put",
    "aten._unsafe_index_put.default": "index_put",
    "aten.slice_scatter.default": "slice_scatter",
    "aten.select_scatter.default": "select_scatter",
    "aten.scatter.src": "scatter",
    "aten.where.self": "where",
    COPY: "copy",
}
"""Operators that may be a cache write, and the form by which `forms.py` reads them."""

ALIASES = frozenset(_aten("alias detach lift_fresh"))
"""Another name for the same tensor."""
AXIS_MOVES = frozenset(_aten("permute transpose.int swapaxes swapdims t"))
"""The same memory with its axes in another order."""
WHOLE_VIEWS = ALIASES | AXIS_MOVES
SLICES = frozenset(_aten("slice.Tensor select.int"))
"""A part of the same memory."""
RESHAPES = frozenset(_aten("view reshape unsqueeze squeeze squeeze.dim squeeze.dims expand"))
"""The same memory under another shape."""
CLONES = frozenset(_aten("clone contiguous"))
"""The same values in other memory."""
COPIES = CLONES | frozenset(_aten("_to_copy to.dtype to.dtype_layout _reshape_copy view.dtype"))
"""Other memory, or the same memory under another type."""
METADATA = frozenset(
    _aten(
        "sym_size.int sym_stride.int sym_numel sym_storage_offset _assert_tensor_metadata "
        "zeros_like ones_like empty_like full_like new_zeros new_ones new_empty new_full"
    )
)
"""Look at a tensor's shape or type, never at its content."""

SLICE = "aten.slice.Tensor"
EXPAND = "aten.expand.default"
DIVISIONS: Mapping[str, str | None] = {
    # how one rounds where no argument says so
    **dict.fromkeys(_aten("floor_divide floor_divide.Scalar"), "floor"),
    **dict.fromkeys(_aten("div.Tensor_mode div.Scalar_mode")),
}
EQUALITY = frozenset(_aten("eq.Scalar eq.Tensor"))

LAYOUT = frozenset(
    name
    for name, rule in TABLE.items()
    if rule in (_same, _same_prim, _reshape, _expand, _unsqueeze, _permute, _transpose, _slice, _select)
)
"""Move, repeat or cast elements one by one: what holds of the operand's elements holds of the result's."""

ATTEND = "quire.attend.default"
SDPA = frozenset(
    _aten(
        "scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention _scaled_dot_product_attention_math"
    )
)
SOFTMAX = frozenset(_aten("softmax.int _softmax _safe_softmax"))
MATMUL = frozenset(_aten("matmul mm bmm addmm baddbmm einsum linear"))
PROJECTIONS: Mapping[str, tuple[str, str]] = {
    # product -> its rows and its weight
    "aten.linear.default": ("input", "weight"),
    "aten.matmul.default": ("self", "other"),
    "aten.mm.default": ("self", "mat2"),
    "aten.addmm.default": ("mat1", "mat2"),
}
SCORES = LAYOUT | frozenset(
    _aten(
        "add.Tensor add.Scalar sub.Tensor sub.Scalar mul.Tensor mul.Scalar div.Tensor div.Scalar tanh clamp maximum cat "
        "where.self where.ScalarOther where.ScalarSelf masked_fill.Scalar masked_fill.Tensor dropout"
    )
)
"""What may stand between the product of queries and keys and its softmax, and between the softmax and the product with values."""
PARTS = frozenset(
    [
        *_aten("split.Tensor split_with_sizes chunk unbind.int repeat repeat_interleave.self_int copy slice_scatter"),
        "<built-in function getitem>",
    ]
)
"""Take a cache's content apart, repeat it or put it together with something else, for attentions to read."""
KEEP_HIDDEN = frozenset(_aten("cat dropout"))
DIFFERENCES = frozenset(_aten("sub.Tensor sub.Scalar"))
FACTORS = frozenset(_aten("mul.Tensor mul.Scalar div.Tensor div.Scalar"))
SUMS = frozenset(_aten("add.Tensor add.Scalar"))
"""Of these: a score that is hidden stays hidden, if what the operator does to it is that alone."""
WEIGHTS = SOFTMAX | SDPA | frozenset([ATTEND, *_aten("exp")])

AT_MOST: Mapping[str, tuple[int, int]] = {
    # comparison -> (sign, slack): it says sign * (self - other) + slack >= 0
    **dict.fromkeys(_aten("le.Tensor le.Scalar"), (-1, 0)),
    **dict.fromkeys(_aten("lt.Tensor lt.Scalar"), (-1, -1)),
    **dict.fromkeys(_aten("ge.Tensor ge.Scalar"), (1, 0)),
    **dict.fromkeys(_aten("gt.Tensor gt.Scalar"), (1, -1)),
}
BOTH = frozenset(_aten("bitwise_and.Tensor logical_and __and__.Tensor mul.Tensor"))
NOT = frozenset(_aten("bitwise_not logical_not"))
CHOICES = frozenset(_aten("where.self where.ScalarOther where.ScalarSelf where.Scalar"))
FILL_MASKED = frozenset(_aten("masked_fill.Scalar masked_fill.Tensor"))
CONSTANTS = frozenset(_aten("full full_like new_full scalar_tensor"))
ZEROS = frozenset(_aten("zeros zeros_like new_zeros"))
ONES = frozenset(_aten("ones ones_like new_ones"))

ANGLES = frozenset(_aten("cos sin polar"))
"""Where rotary embeddings turn positions into rotations."""


def may_attend(name: str) -> bool:
    """Whether an operator that is none of the above may mask cells out of sight: torch's other attentions, custom operators."""
    return "attention" in name or not name.startswith(("aten.", "prims."))

"""Dynamic sizes added to a program after its export."""

from __future__ import annotations

from torch import SymInt
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, StrictMinMaxConstraint
from torch.utils._sympy.value_ranges import ValueRanges


def new_size(mode: FakeTensorMode, name: str, *, sample: int, minimum: int, maximum: int) -> SymInt:
    """A fresh size over `minimum..maximum` in the program whose tensors belong to `mode`. `sample` is what tracing sees (>= 2)."""
    shape_env = mode.shape_env
    assert shape_env is not None
    assert sample >= 2, "0 and 1 are traced as constants"
    source = ConstantSource(name)
    symbol = shape_env.create_symbol(
        sample,
        source,
        dynamic_dim=DimDynamic.DYNAMIC,
        constraint_dim=StrictMinMaxConstraint(vr=ValueRanges(minimum, maximum), warn_only=False),
        do_not_specialize_zero_one=True,
    )
    size = shape_env.create_symintnode(symbol, hint=sample, source=source)
    assert isinstance(size, SymInt)
    return size

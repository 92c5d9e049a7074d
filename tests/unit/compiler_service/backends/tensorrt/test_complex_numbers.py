"""Rotations by complex numbers say the same in real ones; what has no real form is refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

from compiler_service.backends.tensorrt.complex_numbers import without_complex_numbers
from compiler_service.export.program import AxisRange, DecoderProgram
from shared.bindings import INPUT_IDS
from shared.errors import UnsupportedModel
from shared.kv_spec import DType, KVCacheSpec, LayerGroup, Layout
from shared.profiles import ProfileSet, parse_profile

HEADS, DIM, LONGEST = 3, 8, 9


class _Rotation(nn.Module):
    """As Llama 4 turns its keys."""

    def forward(self, input_ids: Tensor, rows: Tensor) -> Tensor:
        angles = input_ids[..., None] * 0.5 ** torch.arange(DIM // 2)
        turns = torch.polar(torch.ones_like(angles), angles) * 1.5
        numbers = torch.view_as_complex(rows.reshape(*rows.shape[:-1], -1, 2))
        return torch.view_as_real(numbers * turns[:, :, None, :]).flatten(3)


class _Inverse(nn.Module):
    def forward(self, input_ids: Tensor, rows: Tensor) -> Tensor:
        numbers = torch.view_as_complex(rows.reshape(*rows.shape[:-1], -1, 2))
        return torch.view_as_real(numbers.reciprocal()).flatten(3) * input_ids[..., None, None]


def program_of(module: nn.Module) -> DecoderProgram:
    length = Dim("length", min=1, max=LONGEST)
    inputs = (torch.zeros(1, 5, dtype=torch.int32), torch.zeros(1, 5, HEADS, DIM))
    program = export(module, inputs, dynamic_shapes=({1: length}, {1: length}), strict=False).run_decompositions({})
    cache = KVCacheSpec((LayerGroup((0,), HEADS, DIM, DType.FLOAT32),), Layout.LINEAR, 16, 16)
    profiles = ProfileSet((parse_profile("decode=1x1"), parse_profile(f"prefill=1x{LONGEST}")))
    names = {INPUT_IDS: INPUT_IDS, "rows": "rows"}
    return DecoderProgram(program, cache, profiles, AxisRange(1, 1), AxisRange(1, LONGEST), 1, names, {}, {})


@pytest.mark.parametrize("length", [1, 7])
def test_a_rotation_is_the_same_in_real_numbers(length: int) -> None:
    program = program_of(_Rotation())
    real = without_complex_numbers(program).program
    assert not any(isinstance(v := n.meta.get("val"), Tensor) and v.dtype.is_complex for n in real.graph.nodes)
    ids = torch.arange(4, 4 + length, dtype=torch.int32)[None]
    rows = torch.randn(1, length, HEADS, DIM, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(real.module(check_guards=False)(ids, rows), _Rotation()(ids, rows))


def test_another_operator_on_complex_numbers_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match=r"reciprocal.*complex numbers, which TensorRT does not have"):
        without_complex_numbers(program_of(_Inverse()))

"""A step whose keys are written as a run and whose values are not: every second cell, which TensorRT's layer cannot do."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

from compiler_service.export.program import DecoderProgram
from compiler_service.ingest.program_caches import find_caches
from compiler_service.lowering.adopt import adopt_program
from shared.kv_spec import DType, KVCacheSpec, LayerGroup, Layout
from shared.profiles import ProfileSet, parse_profile

VOCAB, MAX_LEN, DIM, LONGEST = 300, 64, 16, 8


class StridedStep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, DIM).requires_grad_(False)
        self.register_buffer("key_cache", torch.zeros(1, 1, MAX_LEN, DIM))
        self.register_buffer("value_cache", torch.zeros(1, 1, MAX_LEN, DIM))

    def forward(self, input_ids: Tensor, start: Tensor) -> Tensor:
        rows = self.embed(input_ids)[:, None]
        cells = torch.arange(input_ids.shape[1]) + start
        self.key_cache.index_copy_(2, cells, rows)
        self.value_cache.index_copy_(2, cells * 2, rows * 3)
        seen = (self.key_cache + self.value_cache * 0.5).sum(2)
        return (rows[:, 0] + seen) @ self.embed.weight.T


def export_strided() -> ExportedProgram:
    inputs = (torch.zeros(1, 5, dtype=torch.int64), torch.tensor(0))
    return export(StridedStep(), inputs, dynamic_shapes=({1: Dim("length", min=1, max=LONGEST)}, None), strict=False)


def strided_program() -> DecoderProgram:
    program = export_strided().run_decompositions({})
    spec = KVCacheSpec((LayerGroup((0,), 1, DIM, DType.FLOAT32),), Layout.LINEAR, MAX_LEN, MAX_LEN)
    profiles = ProfileSet((parse_profile("decode=1x1"), parse_profile(f"prefill=1x{LONGEST}")))
    return adopt_program(program, find_caches(program), spec, profiles)

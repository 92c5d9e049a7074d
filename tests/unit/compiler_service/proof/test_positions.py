"""Rotary positions: the declared logical positions where there are any, the written cells otherwise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

from compiler_service.proof.certificate import ProofReport, prove_program
from compiler_service.proof.program import CacheDecl
from shared.kernels.attention.ops import load_ops

BATCH, HEADS, LENGTH, HEAD_DIM = 2, 2, 16, 4
Positions = Callable[[Tensor, Tensor, int], Tensor]
"""(positions input `[batch, n]`, start, n) -> what the rows are rotated by."""


class Layers(nn.Module):
    def __init__(self, positions: dict[str, Positions]) -> None:
        super().__init__()
        self.positions = positions
        self.k = nn.Module()
        for name in positions:
            self.k.register_buffer(name, torch.zeros(BATCH, HEADS, LENGTH, HEAD_DIM))

    def step(self, x: Tensor, given: Tensor, start: Tensor) -> list[Tensor]:
        n = x.shape[2]
        outputs = []
        for name, positions in self.positions.items():
            k = getattr(self.k, name)
            angles = positions(given, start, n).float()[..., None] * torch.tensor([1.0, 1.0, 0.1, 0.1])
            rows = x * angles.cos()[:, None] + x.flip(-1) * angles.sin()[:, None]
            k.index_copy_(2, torch.arange(n) + start, rows)
            outputs.append(torch.ops.quire.attend(x, k, k, start.expand(BATCH).int(), 1.0, None, None, None))
        return outputs


class Declaring(Layers):
    def forward(self, x: Tensor, position_ids: Tensor, start: Tensor) -> list[Tensor]:
        return self.step(x, position_ids, start)


class Undeclaring(Layers):
    def forward(self, x: Tensor, others: Tensor, start: Tensor) -> list[Tensor]:
        return self.step(x, others, start)


DECLARED: dict[str, tuple[Positions, str]] = {
    # name: (positions, what the reason must say; empty: right)
    "given": (lambda given, start, n: given, ""),
    "given_as_64_bit": (lambda given, start, n: given.long(), ""),
    "cells": (lambda given, start, n: (torch.arange(n) + start)[None], "refuted: rows are rotated by start + 1*i"),
    "one_further": (lambda given, start, n: given + 1, "refuted: rows are rotated by position_ids[row,i1] + 1"),
    "frozen": (lambda given, start, n: torch.arange(n)[None], "refuted: rows are rotated by 0 + 1*i"),
    "scaled": (lambda given, start, n: 2 * given, "refuted: rows are rotated by 2*position_ids[row,i1]"),
    "clamped": (lambda given, start, n: given.clamp(0, 9), "unknown: rows are rotated by clamp"),
    "first_for_all": (lambda given, start, n: given[:, :1].expand(-1, n), "refuted: rows are rotated by position_ids[row,0]"),
    "one_row_for_all": (lambda given, start, n: given[:1].expand(BATCH, n), "refuted: rows are rotated by position_ids[0,i1]"),
}
UNDECLARED: dict[str, tuple[Positions, str]] = {
    "cells": (lambda given, start, n: (torch.arange(n) + start)[None], ""),
    "frozen": (lambda given, start, n: torch.arange(n)[None], "refuted: rows are rotated by 0 + 1*i"),
    "backwards": (lambda given, start, n: (start - torch.arange(n))[None], "unknown: rows are rotated by start + -1*i"),
    "by_row": (lambda given, start, n: (torch.arange(BATCH) + start)[:, None].expand(-1, n), "unknown: rows are rotated by start"),
    "others": (lambda given, start, n: given, "unknown: rows are rotated by others[row,i1]"),
}


def _prove(layers: Layers) -> ProofReport:
    load_ops()
    n = Dim("n", min=2, max=12)
    inputs = (torch.randn(BATCH, HEADS, 6, HEAD_DIM), torch.zeros(BATCH, 6, dtype=torch.int32), torch.tensor(3))
    program = export(layers, inputs, dynamic_shapes=({2: n}, {1: n}, None))
    caches = {name: CacheDecl(f"k.{name}", layer=layer) for layer, name in enumerate(layers.positions)}
    return prove_program(program, program.run_decompositions(), caches)


@pytest.fixture(scope="module")
def reports() -> dict[str, ProofReport]:
    return {
        "declared": _prove(Declaring({name: positions for name, (positions, _) in DECLARED.items()})),
        "undeclared": _prove(Undeclaring({name: positions for name, (positions, _) in UNDECLARED.items()})),
    }


@pytest.mark.parametrize(
    ("which", "name", "reason"),
    [("declared", name, reason) for name, (_, reason) in DECLARED.items()]
    + [("undeclared", name, reason) for name, (_, reason) in UNDECLARED.items()],
)
def test_rotation_by_anything_but_the_right_positions_is_refused(
    reports: dict[str, ProofReport], which: str, name: str, reason: str
) -> None:
    proof = reports[which][name]
    assert proof.ok == (not reason), proof.reason
    assert reason in proof.reason

"""Caches are found wherever in the module tree they lie, by whole names."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from compiler_service.ingest.program_caches import LayerCaches, find_caches
from shared.errors import UnsupportedModel


class Store(nn.Module):
    def __init__(self, names: tuple[str, ...] = ("k", "v")) -> None:
        super().__init__()
        for name in names:
            self.register_buffer(name, torch.zeros(1, 1, 8, 4))
        self.names = names

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        for name in self.names:
            getattr(self, name).index_copy_(2, position, x)
        return sum((getattr(self, name).sum() for name in self.names), start=x.sum())


class Nested(nn.Module):
    """Two stores whose names are one once dots are underscores."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.a_b = nn.Module(), nn.Module()
        self.a.b_c, self.a_b.c = nn.Module(), nn.Module()
        self.a.b_c.store, self.a_b.c.store = Store(), Store()

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        return self.a.b_c.store(x, position) + self.a_b.c.store(2 * x, position)


def exported(module: nn.Module) -> torch.export.ExportedProgram:
    return torch.export.export(module, (torch.ones(1, 1, 2, 4), torch.tensor([1, 2]))).run_decompositions({})


def test_names_that_flatten_to_one_are_two_layers() -> None:
    """BR-006."""
    program = exported(Nested())
    assert find_caches(program) == (
        LayerCaches("a.b_c.store.k", "a.b_c.store.v"),
        LayerCaches("a_b.c.store.k", "a_b.c.store.v"),
    )
    module = program.module()
    for step in range(3):
        module(torch.full((1, 1, 2, 4), float(step + 1)), torch.tensor([2 * step, 2 * step + 1]))
    buffers = dict(module.named_buffers())
    expected = torch.tensor([1.0, 1, 2, 2, 3, 3, 0, 0])
    assert torch.equal(buffers["a.b_c.store.k"][0, 0, :, 0], expected)
    assert torch.equal(buffers["a_b.c.store.v"][0, 0, :, 0], 2 * expected)


def test_a_written_buffer_without_a_partner_is_named() -> None:
    with pytest.raises(UnsupportedModel, match="written and is neither the keys nor the values"):
        find_caches(exported(Store(("k", "state"))))

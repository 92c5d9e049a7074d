"""Multi-token cache writes with several profiles: what a one-position rule would turn into a cache that stops updating.

The shapes are those of a 26-layer decoder with one K/V head of 256 and a static cache, decoded through profiles [1,1] and [1,16].
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

from compiler_service.proof.certificate import ProofReport, prove_program
from compiler_service.proof.program import CacheDecl
from shared.bindings import cache_name
from shared.errors import WriteNotProven
from shared.profiles import parse_profile

LAYERS, HEAD_DIM, MAX_LEN = 26, 256, 32
PROFILES = (parse_profile("decode=1x1"), parse_profile("prefill=1x16"))
Index = Callable[[int, Tensor], Tensor]


class Caches(nn.Module):
    """Static caches, one layer for each index, written at `index(query length, cumulative length)` and then read."""

    def __init__(self, *indices: Index) -> None:
        super().__init__()
        self.indices = indices
        for i in range(len(indices)):
            self.register_buffer(f"k{i}", torch.zeros(1, 1, MAX_LEN, HEAD_DIM))
            self.register_buffer(f"v{i}", torch.zeros(1, 1, MAX_LEN, HEAD_DIM))

    def forward(self, x: Tensor, cumulative_length: Tensor) -> Tensor:
        total = x.new_zeros(())
        for i, index in enumerate(self.indices):
            for name in (f"k{i}", f"v{i}"):
                cache = getattr(self, name)
                cache.index_copy_(2, index(x.shape[2], cumulative_length), x)
                total = total + cache.sum()
        return total


def _export(module: Caches, length: int | None = None, start_shape: tuple[int, ...] = ()) -> ExportedProgram:
    """With a dynamic query length, or a fixed one."""
    x = torch.zeros(1, 1, length or 8, HEAD_DIM)
    dynamic = None if length else {2: Dim("n", min=1, max=16)}
    return export(module, (x, torch.zeros(start_shape, dtype=torch.int64)), dynamic_shapes=(dynamic, None))


def _prove(program: ExportedProgram, after: ExportedProgram | None = None, layers: int = 1) -> ProofReport:
    caches = {cache_name(i, kind): CacheDecl(f"{kind}{i}", layer=i) for i in range(layers) for kind in "kv"}
    return prove_program(program, after or program.run_decompositions(), caches, PROFILES)


def test_every_write_of_26_layers_is_proven_with_a_decode_and_a_prefill_profile() -> None:
    program = _export(Caches(*[lambda n, start: torch.arange(n) + start] * LAYERS))
    report = _prove(program, layers=LAYERS)
    report.require()
    assert len(report.proven_nodes) == len(report.certificates) == 2 * LAYERS == 52


@pytest.mark.parametrize("shape", [(), (1,)], ids=["0-d", "[1]"])
@pytest.mark.parametrize("length", [None, 1, 8], ids=["dynamic", "one token", "eight tokens"])
def test_an_offset_run_is_proven_in_both_orders(shape: tuple[int, ...], length: int | None) -> None:
    orders: tuple[Index, ...] = (
        lambda n, start: torch.arange(n) + start,
        lambda n, start: start + torch.arange(n),
        lambda n, start: torch.arange(n) + start + 2,
    )
    report = _prove(_export(Caches(*orders), length, shape), layers=len(orders))
    report.require()
    start = "cumulative_length[0]" if shape else "cumulative_length"
    assert [c.start for c in report.certificates[::2]] == [start, start, f"{start} + 2"]
    assert all(c.length == str(length) for c in report.certificates if length)


def _folded(program: ExportedProgram) -> ExportedProgram:
    """Every arange of a fixed length as a frozen parameter, which is what constant folding leaves of it."""
    lowered = copy.deepcopy(program.run_decompositions())
    graph = lowered.graph
    for number, node in enumerate(graph.find_nodes(op="call_function", target=torch.ops.aten.arange.start_step)):
        name = f"_frozen_param{number}"
        lowered.graph_module.register_buffer(name, torch.arange(*node.args))
        with graph.inserting_before(node):
            frozen = graph.get_attr(name)
        frozen.meta = node.meta
        node.replace_all_uses_with(frozen)
        graph.erase_node(node)
    return lowered


def test_the_verdict_survives_constant_folding() -> None:
    """A write classified before folding and rejected after it has lost its write-back for nothing."""
    program = _export(Caches(lambda n, start: torch.arange(n) + start), length=8)
    folded = _folded(program)
    assert not folded.graph.find_nodes(op="call_function", target=torch.ops.aten.arange.start_step)
    report = _prove(program, folded)
    report.require()
    assert {(c.verdict_before, c.verdict_after, c.start, c.length) for c in report.certificates} == {
        ("proved", "proved", "cumulative_length", "8")
    }


@pytest.mark.parametrize(
    ("index", "length", "reason"),
    [
        (lambda n, start: torch.tensor([5, 1, 9]), 3, "holds 5, 1, 9"),
        (lambda n, start: torch.tensor([5, 1, 9]) + start, 3, "holds 5, 1, 9"),
        (lambda n, start: torch.arange(0, 2 * n, 2), None, "step 2"),
        (lambda n, start: start, 1, "rank 0"),
    ],
    ids=["scattered", "scattered+start", "strided", "0-d index"],
)
def test_what_the_layer_would_write_elsewhere_stops_the_build(index: Index, length: int | None, reason: str) -> None:
    """Index (5, 1, 9) would land at 5, 6, 7; and a refused cache whose write-back is gone would never change again."""
    report = _prove(_export(Caches(index), length))
    with pytest.raises(WriteNotProven, match=reason) as error:
        report.require()
    assert set(error.value.details) == {"k_cache.0", "v_cache.0"}
    assert report.proven_nodes == frozenset()


class _DynamicHeads(nn.Module):
    def forward(self, cache: Tensor, x: Tensor) -> Tensor:
        return cache.index_copy_(2, torch.arange(x.shape[2]), x).sum()


def test_a_cache_of_open_extents_is_refused() -> None:
    heads, n = Dim("heads", min=2, max=8), Dim("n", min=1, max=16)
    inputs = (torch.zeros(1, 4, MAX_LEN, 8), torch.zeros(1, 4, 5, 8))
    program = export(_DynamicHeads(), inputs, dynamic_shapes=({1: heads}, {1: heads, 2: n}))
    report = prove_program(program, program.run_decompositions(), {"k_cache.0": CacheDecl("cache", layer=0)})
    assert "axis 1 of k_cache.0 has no fixed size" in report["k_cache.0"].reason

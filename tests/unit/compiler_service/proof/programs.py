"""Many small writes in one exported program, each to a cache of its own, and their proofs.

Exporting takes a second whatever the program holds, so a test file exports once and asks for each cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram, export

from compiler_service.proof.certificate import CacheProof, ProofReport, WriteProof, prove_program
from compiler_service.proof.program import CacheDecl
from compiler_service.proof.verdict import Proved, Refuted, Unknown
from shared.profiles import OptimizationProfile
from tests.support.proof.linear_values import value_of

BATCH, HEADS, LENGTH, HEAD_DIM = 2, 3, 24, 4
QUERY_MIN, QUERY_MAX = 4, 12


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a step is called with. `n` is the dynamic query length."""

    x: Tensor
    """New rows `[batch, heads, n, head_dim]`."""
    p: Tensor
    """int64 `[]`: one start for the batch."""
    p_one: Tensor
    """int64 `[1]`."""
    p_rows: Tensor
    """int32 `[batch]`: a start for each row."""
    positions: Tensor
    """int64 `[n]`."""

    @property
    def n(self) -> int:
        return self.x.shape[2]

    @property
    def count(self) -> Tensor:
        return torch.arange(self.n)

    def rows(self, length: int) -> Tensor:
        """`length` new rows, a number known when exporting."""
        return self.x[:, :, :1].expand(-1, -1, length, -1)


Write = Callable[[Tensor, Inputs], Any]
"""Writes the cache it is given; what it returns is an output besides the cache's sum (None: nothing)."""


class Zoo(nn.Module):
    def __init__(self, writes: Mapping[str, Write], make_cache: Callable[[], Tensor]) -> None:
        super().__init__()
        self.writes = writes
        self.caches = nn.Module()
        for name in writes:
            self.caches.register_buffer(name, make_cache())

    def forward(self, x: Tensor, p: Tensor, p_one: Tensor, p_rows: Tensor, positions: Tensor) -> list[Tensor]:
        given, outputs = Inputs(x, p, p_one, p_rows, positions), []
        for name, write in self.writes.items():
            cache = getattr(self.caches, name)
            returned = write(cache, given)
            outputs.append(cache.sum())
            if returned is not None:
                outputs.append(returned)
        return outputs


def make_cache() -> Tensor:
    return torch.zeros(BATCH, HEADS, LENGTH, HEAD_DIM)


def example(batch: int = BATCH) -> tuple[Tensor, ...]:
    n = 5
    values = Inputs(
        x=torch.randn(batch, HEADS, n, HEAD_DIM),
        p=torch.tensor(3),
        p_one=torch.tensor([3]),
        p_rows=torch.tensor([3, 4], dtype=torch.int32)[:batch],
        positions=torch.arange(n),
    )
    return tuple(getattr(values, field.name) for field in fields(Inputs))


def export_zoo(writes: Mapping[str, Write], make_cache: Callable[[], Tensor] = make_cache) -> ExportedProgram:
    n = Dim("n", min=QUERY_MIN, max=QUERY_MAX)
    return export(Zoo(writes, make_cache), example(make_cache().shape[0]), dynamic_shapes=({2: n}, None, None, None, {0: n}))


def declared(names: Sequence[str]) -> dict[str, CacheDecl]:
    return {name: CacheDecl(f"caches.{name}", layer=layer) for layer, name in enumerate(names)}


def prove_zoo(writes: Mapping[str, Write], profiles: Sequence[OptimizationProfile] = (), **kwargs: Any) -> ProofReport:
    program = export_zoo(writes, **kwargs)
    return prove_program(program, program.run_decompositions(), declared(list(writes)), profiles)


def kinds(proof: CacheProof) -> tuple[type, type]:
    """Kinds of verdict before and after lowering."""
    return type(proof.before.verdict), type(proof.after.verdict)


PROVED, REFUTED, UNKNOWN = (Proved, Proved), (Refuted, Refuted), (Unknown, Unknown)


class _Recorder(fx.Interpreter):
    """Runs a functional graph and keeps every node's value."""

    def __init__(self, program: ExportedProgram) -> None:
        super().__init__(program.graph_module, garbage_collect_values=False)

    def values(self, inputs: Sequence[Any]) -> dict[str, Any]:
        self.run(*inputs, enable_io_processing=False)
        return {node.name: value for node, value in self.env.items()}


def differs_by_value(program: ExportedProgram, proof: WriteProof, inputs: Sequence[Tensor]) -> str:
    """How executing `program` contradicts a proven write of it; empty if the cache is the old one with the run's block in it.

    The block is laid out from the proof alone: start, length and the axes of the update.
    """
    signature = program.graph_signature
    stored = {spec.arg.name: _stored(program, spec.target) for spec in signature.input_specs if spec.target is not None}
    given = dict(zip(signature.user_inputs, inputs, strict=True))
    names = [node.name for node in program.graph.find_nodes(op="placeholder")]
    values = _Recorder(program).values([given[name] if name in given else stored[name] for name in names])
    (cache,) = [spec.arg.name for spec in signature.input_specs if spec.target == f"caches.{proof.cache}"]
    (written,) = [spec.arg.name for spec in signature.output_specs if spec.target == f"caches.{proof.cache}"]
    run = proof.run
    assert run is not None
    update = values[proof.update]
    for axis, own in enumerate(proof.update_axes):
        if own is None:
            update = update.unsqueeze(update.ndim)
            proof = replace(proof, update_axes=(*proof.update_axes[:axis], update.ndim - 1, *proof.update_axes[axis + 1 :]))
    rows_first = update.permute([own for own in proof.update_axes if own is not None])
    expected = values[cache].clone()
    length = rows_first.shape[run.axis]
    for row in range(expected.shape[0]):
        start = value_of(run.start, row=row, sizes={}, values=values)
        assert start is not None, f"{run.start} is not a value of the program"
        expected[row].narrow(run.axis - 1, start, length).copy_(rows_first[row])
    return "" if torch.equal(expected, values[written]) else f"{proof.cache} is not written as {run}, axes {proof.update_axes}"


def _stored(program: ExportedProgram, target: str) -> Any:
    return program.state_dict[target] if target in program.state_dict else program.constants[target]

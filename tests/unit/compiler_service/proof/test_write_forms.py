"""Every operator a cache write may arrive as, checked by value: the proof's block is what executing the program writes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

from compiler_service.proof.certificate import ProofReport, prove_program
from compiler_service.proof.program import CacheDecl
from compiler_service.proof.verdict import Proved, Unknown
from tests.unit.compiler_service.proof.programs import (
    BATCH,
    HEAD_DIM,
    HEADS,
    LENGTH,
    PROVED,
    REFUTED,
    UNKNOWN,
    Inputs,
    Write,
    declared,
    differs_by_value,
    example,
    export_zoo,
    kinds,
)

# torch hands its own helper for sizes and strides a number that may vary.
pytestmark = pytest.mark.filterwarnings("ignore:Raw SymInt value:UserWarning")


def assign(place: Callable[[Inputs], object], rows: Callable[[Inputs], object] = lambda i: i.x) -> Write:
    def write(cache: Tensor, i: Inputs) -> None:
        cache[place(i)] = rows(i)

    return write


def _index_put(place: Callable[[Inputs], list[Tensor | None]], rows: Callable[[Inputs], Tensor]) -> Write:
    def write(cache: Tensor, i: Inputs) -> None:
        torch.ops.aten.index_put_(cache, place(i), rows(i))

    return write


def _scatter(index: Callable[[Inputs], Tensor], rows: Callable[[Inputs], Tensor] = lambda i: i.x) -> Write:
    def write(cache: Tensor, i: Inputs) -> None:
        cache.scatter_(2, index(i), rows(i))

    return write


def per_row(i: Inputs) -> Tensor:
    return i.p_rows[:, None] + i.count


def cells_first(i: Inputs) -> Tensor:
    """The new rows as `[batch, n, heads, head_dim]`: indexed axes that are no neighbours come first."""
    return i.x.transpose(1, 2)


def first_cell(i: Inputs) -> Tensor:
    return i.x[:, :, 0]


ALL = slice(None)


def batch_rows() -> Tensor:
    return torch.arange(BATCH)


def _narrow(cache: Tensor, i: Inputs) -> None:
    start = i.p.item()
    torch._check(start >= 0)
    torch._check(start + i.n <= LENGTH)
    cache.narrow(2, start, i.n).copy_(i.x)


def _slice_from_scalar(cache: Tensor, i: Inputs) -> None:
    start = i.p.item()
    torch._check(start >= 0)
    torch._check(start + i.n <= LENGTH)
    cache[:, :, start : start + i.n] = i.x


def _moved_axes(cache: Tensor, i: Inputs) -> None:
    cache.transpose(1, 2)[:, 2:6] = i.rows(4).transpose(1, 2)


def _moved_axes_by_index(cache: Tensor, i: Inputs) -> None:
    cache.permute(2, 0, 1, 3).index_copy_(0, i.count + i.p, i.x.permute(2, 0, 1, 3))


def _whole_from_new(cache: Tensor, i: Inputs) -> None:
    cache.copy_(cache.index_copy(2, i.count + i.p, i.x))


RUNS: dict[str, tuple[Write, tuple[str, str], str]] = {
    # name: (write, form before and after lowering, start)
    "whole_cache": (assign(lambda i: (ALL, ALL, slice(0, LENGTH)), lambda i: i.rows(LENGTH)), ("copy", "copy"), "0"),
    "open_end": (assign(lambda i: (ALL, ALL, slice(3, None)), lambda i: i.rows(LENGTH - 3)), ("slice_scatter",) * 2, "3"),
    "from_the_end": (assign(lambda i: (ALL, ALL, slice(-4, None)), lambda i: i.rows(4)), ("slice_scatter",) * 2, "20"),
    "up_to_the_end": (assign(lambda i: (ALL, ALL, slice(-6, -2)), lambda i: i.rows(4)), ("slice_scatter",) * 2, "18"),
    "past_the_end": (assign(lambda i: (ALL, ALL, slice(21, 99)), lambda i: i.rows(3)), ("slice_scatter",) * 2, "21"),
    "one_cell_stepped": (assign(lambda i: (ALL, ALL, slice(5, 6, 2)), lambda i: i.rows(1)), ("slice_scatter",) * 2, "5"),
    "narrow_from_scalar": (_narrow, ("slice_scatter",) * 2, "p"),
    "slice_from_scalar": (_slice_from_scalar, ("slice_scatter",) * 2, "p"),
    "one_cell": (assign(lambda i: (ALL, ALL, 7), first_cell), ("select_scatter", "where"), "7"),
    "last_cell": (assign(lambda i: (ALL, ALL, -1), first_cell), ("select_scatter", "where"), "23"),
    "moved_axes": (_moved_axes, ("slice_scatter",) * 2, "2"),
    "moved_axes_by_index": (_moved_axes_by_index, ("index_copy", "index_put"), "p"),
    "whole_from_new": (_whole_from_new, ("index_copy", "index_put"), "p"),
    "negative_axis": (lambda c, i: c.index_copy_(-2, i.count + i.p, i.x).sum(), ("index_copy", "index_put"), "p"),
    "indexed": (assign(lambda i: (ALL, ALL, i.count + i.p)), ("index_put",) * 2, "p"),
    "indexed_32_bit": (assign(lambda i: (ALL, ALL, (i.count + i.p).int())), ("index_put",) * 2, "p"),
    "a_start_per_row": (assign(lambda i: (batch_rows()[:, None], ALL, per_row(i)), cells_first), ("index_put",) * 2, "p_rows[row]"),
    "rows_and_heads": (
        assign(lambda i: (batch_rows()[:, None, None], torch.arange(HEADS)[:, None], per_row(i)[:, None])),
        ("index_put",) * 2,
        "p_rows[row]",
    ),
    "heads_and_cells": (
        _index_put(lambda i: [None, torch.arange(HEADS)[:, None], i.count + i.p], lambda i: i.x),
        ("index_put",) * 2,
        "p",
    ),
    "every_axis": (
        _index_put(
            lambda i: [
                batch_rows()[:, None, None, None],
                torch.arange(HEADS)[:, None, None],
                per_row(i)[:, None, :, None],
                torch.arange(HEAD_DIM),
            ],
            lambda i: i.x,
        ),
        ("index_put",) * 2,
        "p_rows[row]",
    ),
    "one_cell_per_row": (assign(lambda i: (batch_rows(), ALL, i.p_rows), first_cell), ("index_put",) * 2, "p_rows[row]"),
    "rows_apart": (
        assign(lambda i: (batch_rows()[:, None], ALL, 4 * batch_rows()[:, None] + i.count), cells_first),
        ("index_put",) * 2,
        "4*row",
    ),
    "diagonal": (assign(lambda i: (batch_rows(), ALL, batch_rows() + i.p), first_cell), ("index_put",) * 2, "p + row"),
    "scattered_alike": (
        _scatter(lambda i: (i.count + i.p)[None, None, :, None].expand(BATCH, HEADS, -1, HEAD_DIM)),
        ("scatter",) * 2,
        "p",
    ),
    "scattered_per_row": (
        _scatter(lambda i: per_row(i).long()[:, None, :, None].expand(-1, HEADS, -1, HEAD_DIM)),
        ("scatter",) * 2,
        "p_rows[row]",
    ),
}


def _roll(cache: Tensor, i: Inputs) -> None:
    cache.copy_(torch.cat([cache, i.x], 2)[:, :, -LENGTH:])


def _masked(cache: Tensor, i: Inputs) -> None:
    cache.copy_(torch.where((torch.arange(LENGTH) < i.p)[:, None], i.rows(LENGTH), cache))


def _added(cache: Tensor, i: Inputs) -> None:
    torch.ops.aten.index_put_(cache, [None, None, i.count + i.p], i.x, True)


NO_RUNS: dict[str, tuple[Write, tuple[type, type], str]] = {
    # name: (write, verdict, what the reason must say)
    "strided": (assign(lambda i: (ALL, ALL, slice(0, 8, 2)), lambda i: i.rows(4)), REFUTED, "first two cells are 0 and 2: step 2"),
    "head_axis": (assign(lambda i: (ALL, slice(0, 1)), lambda i: i.rows(LENGTH)[:, :1]), REFUTED, "along axis 1"),
    "head_axis_indexed": (assign(lambda i: (ALL, torch.arange(HEADS)), lambda i: i.rows(LENGTH)), REFUTED, "indexes axis 1"),
    "some_rows": (assign(lambda i: (slice(0, 1), ALL, slice(2, 6)), lambda i: i.rows(4)[:1]), REFUTED, "along axis 0"),
    "rows_backwards": (
        assign(lambda i: (batch_rows().flip(0)[:, None], ALL, per_row(i)), cells_first),
        UNKNOWN,
        "axis 0 is indexed by something else",
    ),
    "one_row_for_all": (
        assign(lambda i: (0 * batch_rows()[:, None], ALL, per_row(i)), cells_first),
        UNKNOWN,
        "axis 0 is indexed by something else",
    ),
    "first_row_only": (
        assign(lambda i: (torch.arange(1)[:, None], ALL, (i.count + i.p)[None]), lambda i: cells_first(i)[:1]),
        UNKNOWN,
        "axis 0 is indexed",
    ),
    "a_cell_per_head": (
        assign(lambda i: (ALL, torch.arange(HEADS), torch.arange(HEADS)), first_cell),
        UNKNOWN,
        "not the same along axis 0",
    ),
    "two_cell_axes": (
        assign(lambda i: (ALL, ALL, i.count[:, None] + torch.arange(2)), lambda i: i.x[..., None, :].expand(-1, -1, -1, 2, -1)),
        UNKNOWN,
        "2 axes at once",
    ),
    "added": (_added, REFUTED, "adds to the cells"),
    "scatter_added": (
        lambda c, i: c.scatter_add_(2, (i.count + i.p)[None, None, :, None].expand(BATCH, HEADS, -1, HEAD_DIM), i.x).sum(),
        UNKNOWN,
        "scatter_add",
    ),
    "scatter_on_some_heads": (
        _scatter(lambda i: (i.count + i.p)[None, None, :, None].expand(BATCH, 1, -1, HEAD_DIM)),
        UNKNOWN,
        "covers 1 of 3 along axis 1",
    ),
    "scatter_by_head": (
        _scatter(lambda i: ((i.count + i.p)[None, :, None] + torch.arange(HEADS)[:, None, None]).expand(BATCH, -1, -1, HEAD_DIM)),
        UNKNOWN,
        "not the same along axis 1",
    ),
    "chosen_by_mask": (assign(lambda i: (ALL, ALL, torch.arange(LENGTH) < 4), lambda i: i.rows(4)), UNKNOWN, ""),
    "filled": (assign(lambda i: (ALL, ALL, i.count + i.p), lambda i: torch.zeros(())), UNKNOWN, "update is broadcast"),
    "one_head_for_all": (assign(lambda i: (ALL, ALL, i.count + i.p), lambda i: i.x[:, :1]), UNKNOWN, "size 1 along axis 1"),
    # Lowering gives the index its missing axis, so only the form before it is in the way.
    "rank_0_index": (lambda c, i: c.index_copy_(2, i.p, i.x[:, :, :1]).sum(), (Unknown, Proved), "rank 0"),
    "shifted_window": (_roll, REFUTED, "cat reads shifted_window as it was before"),
    "chosen_cells": (_masked, UNKNOWN, "not by one index"),
    "half_precision": (assign(lambda i: (ALL, ALL, slice(0, 4)), lambda i: i.rows(4).half()), REFUTED, "float16"),
    "cells_of_a_part": (
        lambda c, i: c[:, :, 4:].index_copy_(2, i.count + i.p, i.x).sum(),
        REFUTED,
        "reads cells_of_a_part as it was before",
    ),
    "nothing": (lambda c, i: None, UNKNOWN, "nothing in the program writes"),
}


@pytest.fixture(scope="module")
def program() -> ExportedProgram:
    return export_zoo({name: write for name, (write, *_) in (RUNS | NO_RUNS).items()})


@pytest.fixture(scope="module")
def lowered(program: ExportedProgram) -> ExportedProgram:
    return program.run_decompositions()


@pytest.fixture(scope="module")
def report(program: ExportedProgram, lowered: ExportedProgram) -> ProofReport:
    return prove_program(program, lowered, declared([*RUNS, *NO_RUNS]))


@pytest.mark.parametrize("name", RUNS)
def test_runs_are_proved_in_every_form(report: ProofReport, name: str) -> None:
    """BR-001 among them: a negative start is an index from the end, an open end is the end."""
    _, forms, start = RUNS[name]
    proof = report[name]
    assert kinds(proof) == PROVED, proof.reason
    assert proof.ok
    assert (proof.before.form, proof.after.form) == forms
    assert str(proof.after.run and proof.after.run.start) == start


@pytest.mark.parametrize("name", RUNS)
def test_the_proven_block_is_what_the_program_writes(report: ProofReport, lowered: ExportedProgram, name: str) -> None:
    assert not differs_by_value(lowered, report[name].after, example())


class _Layout(nn.Module):
    """Caches with their cells on another axis than usual: `[batch, cells, heads, head_dim]` and `[batch, cells, dim]`."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flash", torch.zeros(BATCH, LENGTH, HEADS, HEAD_DIM))
        self.register_buffer("shared", torch.zeros(BATCH, LENGTH, HEAD_DIM))

    def forward(self, x: Tensor, p: Tensor, p_rows: Tensor) -> Tensor:
        cells = torch.arange(x.shape[2])
        self.flash[batch_rows()[:, None], p_rows[:, None] + cells] = x.transpose(1, 2)
        self.shared.index_copy_(1, cells + p, x[:, 0])
        return self.flash.sum() + self.shared.sum()


def test_the_cells_may_lie_on_any_declared_axis() -> None:
    inputs = (torch.zeros(BATCH, HEADS, 5, HEAD_DIM), torch.tensor(1), torch.zeros(BATCH, dtype=torch.int32))
    program = export(_Layout(), inputs, dynamic_shapes=({2: Dim("n", min=1, max=LENGTH)}, None, None))
    caches = {"flash": CacheDecl("flash", layer=0, seq_axis=1), "shared": CacheDecl("shared", layer=1, seq_axis=1)}
    report = prove_program(program, program.run_decompositions(), caches)
    report.require()
    assert [str(proof.after.run and proof.after.run.start) for proof in report.caches] == ["p_rows[row]", "p"]
    declared_wrong = prove_program(program, program, {"flash": CacheDecl("flash", layer=0)})
    assert "it indexes axis 0, 1, the cells lie along axis 2" in declared_wrong["flash"].reason


@pytest.mark.parametrize(("batch", "index"), [(1, [9]), (1, [9, 10, 11]), (2, [9, 10, 11]), (2, [4, 5, 6, 7, 8, 9])])
def test_an_indexed_assignment_keeps_heads_and_cells_apart(batch: int, index: list[int]) -> None:
    """BR-016: with six heads and six cells a swap would fit every shape, so the rows are compared by value."""

    def write(cache: Tensor, i: Inputs) -> None:
        cache[:, :, torch.tensor(index)] = i.x[:, :1, :1, :1] * torch.arange(batch * 6 * len(index) * 32).reshape(batch, 6, -1, 32)

    program = export_zoo({"k": write}, lambda: torch.zeros(batch, 6, 20, 32))
    lowered = program.run_decompositions()
    proof = prove_program(program, lowered, declared(["k"]))["k"]
    assert proof.ok, proof.reason
    assert str(proof.after.run and proof.after.run.start) == str(index[0])
    assert not differs_by_value(lowered, proof.after, example(batch))


class _OpenBatch(nn.Module):
    """Three cells of two caches, by an index of the cells alone and by one as wide as the rows."""

    def forward(self, k: Tensor, v: Tensor, x: Tensor, p: Tensor) -> Tensor:
        cells = torch.arange(3) + p
        k.index_copy_(2, cells, x)
        v.scatter_(2, cells[:, None].expand_as(x), x)
        return k.sum() + v.sum()


@pytest.mark.parametrize("rows", [1, 4])
def test_the_batch_may_be_open_where_cells_are_indexed(rows: int) -> None:
    """BR-017: built for 1 to 4 rows, right at both ends."""
    batch = {0: Dim("batch", min=1, max=4)}
    inputs = (torch.zeros(3, HEADS, 48, 24), torch.zeros(3, HEADS, 48, 24), torch.zeros(3, HEADS, 3, 24), torch.tensor(0))
    program = export(_OpenBatch(), inputs, dynamic_shapes=(batch, batch, batch, None))
    lowered = program.run_decompositions()
    prove_program(program, lowered, {name: CacheDecl(name, layer=0) for name in "kv"}).require()
    k, v, x = torch.zeros(rows, HEADS, 48, 24), torch.zeros(rows, HEADS, 48, 24), torch.randn(rows, HEADS, 3, 24)
    lowered.module()(k, v, x, torch.tensor(7))
    expected = torch.zeros_like(k)
    expected[:, :, 7:10] = x
    assert torch.equal(k, expected)
    assert torch.equal(v, expected)


@pytest.mark.parametrize("name", NO_RUNS)
def test_near_misses_are_refused_with_the_reason(report: ProofReport, name: str) -> None:
    _, expected, reason = NO_RUNS[name]
    assert kinds(report[name]) == expected
    assert reason in report[name].reason

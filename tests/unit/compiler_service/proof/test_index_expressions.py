"""Index expressions of index_copy as models write them: which are runs, which are not, before and after lowering."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from compiler_service.proof.certificate import ProofReport
from compiler_service.proof.verdict import Proved, Refuted, Unknown
from tests.unit.compiler_service.proof.programs import LENGTH, PROVED, REFUTED, UNKNOWN, Inputs, Write, kinds, prove_zoo

Index = Callable[[Inputs], Tensor]

START_OF_RUN: dict[str, tuple[Index, str]] = {
    # name: (index, start of the run)
    "counting": (lambda i: i.count, "0"),
    "plus_scalar": (lambda i: i.count + i.p, "p"),
    "scalar_plus": (lambda i: i.p + i.count, "p"),
    "plus_one_element": (lambda i: i.count + i.p_one, "p_one[0]"),
    "one_element_plus": (lambda i: i.p_one + i.count, "p_one[0]"),
    "plus_number": (lambda i: i.count + 7, "7"),
    "minus_scalar": (lambda i: i.count - i.p, "-p"),
    "narrow_and_back": (lambda i: (i.count.to(torch.int32) + i.p.to(torch.int32)).long(), "p"),
    "shift_scaled_by_alpha": (lambda i: i.count.add(i.p, alpha=2), "2*p"),
    "times_one": (lambda i: i.count * 1 + i.p, "p"),
    "sum_of_ones": (lambda i: torch.ones(i.n, dtype=torch.int64).cumsum(0) - 1 + i.p, "p"),
    "clamped_scalar": (lambda i: i.count + i.p.clamp(0, LENGTH - 8), "clamp"),
    "scalar_in_a_ring": (lambda i: i.count + i.p % LENGTH, "remainder"),
    "first_position_plus": (lambda i: i.positions[0] + i.count, "positions[0]"),
    "slice_of_a_longer_one": (lambda i: torch.arange(LENGTH)[3 : 3 + i.n], "3"),
    "row_of_a_matrix": (lambda i: (i.count[None] + i.p)[0], "p"),
    "flattened_matrix": (lambda i: (i.count[None] + i.p).view(-1), "p"),
    "either_of_two_runs": (lambda i: torch.where(i.p > 0, i.count + i.p, i.count), "where.base"),
    "plus_a_sum": (lambda i: i.count + (i.positions > 0).sum(), "sum_1"),
    "plus_a_maximum": (lambda i: i.count + i.p_rows.max(), "max_1"),
    "minus_minus": (lambda i: i.p - (i.p_one - i.count), "p - p_one[0]"),
    "flipped_back": (lambda i: i.count.flip(0).flip(0) + i.p, "p"),
    "positions_cancelled": (lambda i: i.count + i.positions - i.positions, "0"),
    "joined": (lambda i: torch.cat([i.count[:2], i.count[2:]]) + i.p, "p"),
    "broadcast_then_one_row": (lambda i: (i.count + i.p).expand(3, -1)[1], "p"),
}

FIXED_LENGTH: dict[str, tuple[Index, str]] = {
    "static_plus_scalar": (lambda i: torch.arange(4) + i.p, "p"),
    "static_plus_number": (lambda i: torch.arange(4) + 5, "5"),
    "slice_of_static": (lambda i: torch.arange(LENGTH)[2:6], "2"),
    "constant": (lambda i: torch.tensor([3, 4, 5, 6]), "3"),
    "constant_plus_scalar": (lambda i: torch.tensor([3, 4, 5, 6]) + i.p, "p + 3"),
}

NO_RUN: dict[str, tuple[Index, tuple[type, type], str]] = {
    # name: (index, verdict, what the reason must say)
    "run_scaled_by_alpha": (lambda i: i.p.add(i.count, alpha=2), REFUTED, "p and p + 2: step 2"),
    "descending": (lambda i: i.p - i.count, REFUTED, "p and p - 1: step -1"),
    "every_other": (lambda i: torch.arange(0, 2 * i.n, 2) + i.p, REFUTED, "step 2"),
    "doubled": (lambda i: i.count * 2, REFUTED, "0 and 2: step 2"),
    "flipped": (lambda i: i.count.flip(0), REFUTED, "step -1"),
    "repeated": (lambda i: i.p.expand(i.n), REFUTED, "p and p: step 0"),
    "ring": (lambda i: (i.count + i.p) % LENGTH, UNKNOWN, "remainder"),
    "saturating": (lambda i: (i.count + i.p).clamp(max=LENGTH - 1), UNKNOWN, "clamp"),
    "positions": (lambda i: i.positions, UNKNOWN, "positions is an input"),
    "row_of_positions": (lambda i: i.positions[None][0], UNKNOWN, "positions is an input"),
    "plus_positions": (lambda i: i.count + i.positions, UNKNOWN, "positions is an input"),
    "through_float": (lambda i: i.count.float().long() + i.p, UNKNOWN, "float32"),
    "rolled": (lambda i: i.count.roll(1), UNKNOWN, ""),
    "gathered": (lambda i: i.count[i.positions], UNKNOWN, "index"),
    "halved": (lambda i: i.count // 2, UNKNOWN, "div"),
    "either_by_token": (lambda i: torch.where(i.positions > 3, i.count + i.p, i.count), UNKNOWN, "where"),
    "joined_out_of_order": (lambda i: torch.cat([i.count[2:], i.count[:2]]), UNKNOWN, "cat"),
}

FIXED_LENGTH_NO_RUN: dict[str, tuple[Index, tuple[type, type], str]] = {
    "scattered_constant": (lambda i: torch.tensor([5, 1, 9, 10]), REFUTED, "holds 5, 1, 9, 10"),
    "doubled_static": (lambda i: torch.arange(4) * 2, REFUTED, "step 2"),
    "constant_past_the_end": (lambda i: torch.arange(4) + 21, REFUTED, "reaches cell 25; constant_past_the_end has cells 0..24"),
    "negative_constant": (lambda i: torch.tensor([-4, -3, -2, -1]), REFUTED, "starts at cell -4"),
}


def _write(index: Index, length: int | None) -> Write:
    def write(cache: Tensor, i: Inputs) -> None:
        cache.index_copy_(2, index(i), i.x if length is None else i.rows(length))

    return write


@pytest.fixture(scope="module")
def report() -> ProofReport:
    writes = {name: _write(index, None) for name, (index, *_) in (START_OF_RUN | NO_RUN).items()}
    writes |= {name: _write(index, 4) for name, (index, *_) in (FIXED_LENGTH | FIXED_LENGTH_NO_RUN).items()}
    return prove_zoo(writes)


@pytest.mark.parametrize("name", [*START_OF_RUN, *FIXED_LENGTH])
def test_runs_are_proved_with_their_start(report: ProofReport, name: str) -> None:
    proof = report[name]
    assert kinds(proof) == PROVED, proof.reason
    assert proof.ok, proof.reason
    run = proof.before.run
    assert run is not None
    start = (START_OF_RUN | FIXED_LENGTH)[name][1]
    assert str(run.start) == start or start in str(run.start)
    assert str(run.length).isdigit() == (name in FIXED_LENGTH)
    assert (run.axis, str(run.rows)) == (2, "2")
    assert (proof.before.form, proof.after.form) == ("index_copy", "index_put")


@pytest.mark.parametrize("name", [*NO_RUN, *FIXED_LENGTH_NO_RUN])
def test_what_is_no_run_is_refused_with_the_reason(report: ProofReport, name: str) -> None:
    _, expected, reason = (NO_RUN | FIXED_LENGTH_NO_RUN)[name]
    proof = report[name]
    assert kinds(proof) == expected
    assert reason in proof.reason
    assert not proof.ok
    verdict = proof.before.verdict
    assert isinstance(verdict, Refuted | Unknown)
    assert verdict.node in proof.reason


def test_a_scalar_read_into_the_program_is_still_the_same_start() -> None:
    def write(cache: Tensor, i: Inputs) -> None:
        cache.index_copy_(2, i.count + i.p.item(), i.x)

    proof = prove_zoo({"k": write})["k"]
    assert proof.ok, proof.reason
    assert [str(stage.run and stage.run.start) for stage in (proof.before, proof.after)] == ["p", "p"]


def test_a_single_cell_is_a_run_wherever_its_index_comes_from() -> None:
    def write(cache: Tensor, i: Inputs) -> None:
        cache.index_copy_(2, i.p_one % 7, i.rows(1))

    proof = prove_zoo({"k": write})["k"]
    assert kinds(proof) == PROVED, proof.reason
    assert isinstance(proof.after.verdict, Proved)
    assert str(proof.after.verdict.run.length) == "1"

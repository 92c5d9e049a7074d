"""Random index programs: whatever is proved is a run when executed, and hardly any run goes unproved.

`python -m tests.property.prove_fuzz` does the same for 100,000 programs.
"""

from __future__ import annotations

import pytest

from compiler_service.proof.verdict import Proved
from tests.property.index_lowering import lowered
from tests.property.index_oracle import Outcome, judge, prove
from tests.property.index_steps import KEEP, MISS
from tests.property.index_writes import random_program
from tests.property.prove_fuzz import MAX_MISSED, Tally, run, run_exported

PROGRAMS = 2000


@pytest.fixture(scope="module")
def tally() -> Tally:
    return run(range(PROGRAMS))


def test_no_verdict_is_unsound(tally: Tally) -> None:
    assert tally.faults == []


def test_nearly_every_run_is_proved(tally: Tally) -> None:
    assert tally.missed_share < MAX_MISSED


def test_the_programs_are_worth_judging(tally: Tally) -> None:
    """A generator that makes only runs, only junk or only writes outside the cache would prove nothing."""
    assert tally.outcomes[Outcome.PROVED] > PROGRAMS / 2
    assert tally.outcomes[Outcome.NOT_A_RUN] > PROGRAMS / 8
    assert tally.outcomes[Outcome.UNTESTED] < PROGRAMS / 10
    assert tally.compared > PROGRAMS / 8


def test_every_step_is_taken() -> None:
    taken = {choice for seed in range(PROGRAMS) for choice in random_program(seed).trail}
    assert {step.__name__ for step in (*KEEP, *MISS)} <= taken
    assert {"index_copy", "index_put", "rows", "rows_and_heads", "scatter", "rows backwards", "one row for all"} <= taken


def test_the_oracle_sees_a_wrong_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prover that takes every multiple of a run for a run is caught."""
    monkeypatch.setattr("compiler_service.proof.algebra.scale", lambda value, factor: value)
    assert run(range(400)).faults


def test_exported_programs_get_the_same_verdict() -> None:
    traced, refused = run_exported(range(4))
    assert traced.faults == []
    assert traced.compared + refused == 4
    assert traced.compared


def test_folding_a_program_leaves_its_outcome() -> None:
    for seed in range(40):
        program = random_program(seed)
        folded = lowered(program)
        if isinstance(prove(folded).verdict, Proved):
            assert judge(folded, seed).outcome in (Outcome.PROVED, Outcome.UNTESTED)
            assert len(folded.graph.nodes) <= len(program.graph.nodes) + 1


def test_a_seed_is_a_program() -> None:
    assert str(random_program(7).graph) == str(random_program(7).graph)

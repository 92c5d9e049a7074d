"""Random index programs against the prover, in bulk: `python -m tests.property.prove_fuzz --programs 100000`.

Prints what became of them. Exit status 1 on a single unsound verdict (a proof of what is no run, a refutation of what is one,
or a proof that lowering loses), or when 5% or more of the programs that write a run are not proved.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from compiler_service.proof.certificate import prove_program
from compiler_service.proof.verdict import Proved
from tests.property.index_lowering import DECLARED, exported, lowered
from tests.property.index_oracle import NAME, Judgement, Outcome, judge, prove
from tests.property.index_programs import IndexProgram
from tests.property.index_writes import random_program

MAX_MISSED = 0.05
LOWERED_EVERY = 4
"""Folding constants takes as long as proving; every so many programs are also proved in their lowered form."""


@dataclass(slots=True)
class Tally:
    """Counts of outcomes. `faults` are (seed, choices, what is wrong)."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    faults: list[tuple[int, list[str], str]] = field(default_factory=list)
    compared: int = 0

    def add(self, seed: int, program: IndexProgram, judgement: Judgement) -> None:
        self.outcomes[judgement.outcome] += 1
        if judgement.outcome in (Outcome.UNSOUND, Outcome.WRONGLY_REFUTED):
            self.faults.append((seed, program.trail, f"{judgement.outcome.value}: {judgement.verdict}; {judgement.detail}"))

    @property
    def missed_share(self) -> float:
        """Share of programs that write a run without being proved."""
        missed = self.outcomes[Outcome.MISSED] + self.outcomes[Outcome.WRONGLY_REFUTED]
        runs = missed + self.outcomes[Outcome.PROVED]
        return missed / runs if runs else 0.0

    @property
    def ok(self) -> bool:
        return not self.faults and self.missed_share < MAX_MISSED


def run(seeds: Iterable[int]) -> Tally:
    """Judge the programs of `seeds`."""
    tally = Tally()
    for seed in seeds:
        program = random_program(seed)
        judgement = judge(program, seed)
        tally.add(seed, program, judgement)
        if seed % LOWERED_EVERY == 0 and judgement.outcome is Outcome.PROVED:
            tally.compared += 1
            if lost := _lost_by_lowering(program):
                tally.faults.append((seed, program.trail, lost))
    return tally


def _lost_by_lowering(program: IndexProgram) -> str:
    before, after = prove(program), prove(lowered(program))
    assert before.run is not None
    if after.run is not None and before.run.agrees(after.run):
        return ""
    return f"proved before lowering as {before.run}, after it {after.verdict} {after.run}"


def run_exported(seeds: Iterable[int]) -> tuple[Tally, int]:
    """Judge programs that went through torch.export and its decompositions; the second number counts those it refuses."""
    tally, refused = Tally(), 0
    for seed in seeds:
        program = random_program(seed)
        try:
            before = exported(program)
            after = before.run_decompositions()
        except (RuntimeError, ValueError, torch._dynamo.exc.UserError):  # sizes that torch cannot keep open
            refused += 1
            continue
        proof = prove_program(before, after, DECLARED)[NAME]
        judgement = judge(program, seed)
        tally.add(seed, program, judgement)
        tally.compared += 1
        kinds = {type(judgement.verdict), type(proof.before.verdict), type(proof.after.verdict)}
        if Proved in kinds and len(kinds) > 1:
            told = f"{judgement.verdict} as built, {proof.before.verdict} exported, {proof.after.verdict} decomposed"
            tally.faults.append((seed, program.trail, told))
    return tally, refused


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=100_000)
    parser.add_argument("--exported", type=int, default=200, help="programs that also go through torch.export")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    tally = run(range(options.seed, options.seed + options.programs))
    _report(f"{options.programs} programs", tally, began)
    began = time.monotonic()
    traced, refused = run_exported(range(options.seed, options.seed + options.exported))
    _report(f"{options.exported} programs through torch.export ({refused} it refuses)", traced, began)
    return 0 if tally.ok and not traced.faults else 1


def _report(title: str, tally: Tally, began: float) -> None:
    print(f"{title}, {time.monotonic() - began:.0f} s")
    for outcome in Outcome:
        print(f"  {outcome.value:28} {tally.outcomes[outcome]:8}")
    print(f"  {'also proved once lowered':28} {tally.compared:8}")
    print(f"  {'unsound':28} {len(tally.faults):8}")
    print(f"  {'runs not proved':28} {tally.missed_share:8.2%}  (limit {MAX_MISSED:.0%})")
    for seed, trail, fault in tally.faults[:10]:
        print(f"  seed {seed} {' > '.join(trail)}: {fault}")


if __name__ == "__main__":
    sys.exit(main())

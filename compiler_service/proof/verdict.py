"""What the prover answers about one cache write, and the run it proves."""

from __future__ import annotations

from dataclasses import dataclass

from compiler_service.proof.algebra import Linear


@dataclass(frozen=True, slots=True)
class Run:
    """Row `b` of `cache` is written at cells `start .. start + length` of `axis`, in order, and nowhere else.

    `start` is in cells; where it differs between rows it holds terms with a coordinate along axis 0, the row. `rows` is the
    number of rows written (all rows of the cache).
    """

    cache: str
    axis: int
    start: Linear
    length: Linear
    rows: Linear

    def agrees(self, other: Run) -> bool:
        """Whether `other`, read from another form of the same program, can be this run.

        Lowering renames what is inside a program and may compute it away, so starts are compared where both are made of inputs
        and sizes alone.
        """
        same_cells = (self.cache, self.axis, self.length, self.rows) == (other.cache, other.axis, other.length, other.rows)
        comparable = self.start.is_given and other.start.is_given
        return same_cells and (self.start == other.start or not comparable)

    def __str__(self) -> str:
        return f"rows 0..{self.rows}, cells {self.start} .. + {self.length} of axis {self.axis}"


@dataclass(frozen=True, slots=True)
class Proved:
    """The write is `run` for every size and every start inside the cache."""

    run: Run

    def __str__(self) -> str:
        return "proved"


@dataclass(frozen=True, slots=True)
class Refuted:
    """The write is not a run, or in place it would mean something else: `counterexample` shows it, `node` does it."""

    counterexample: str
    node: str

    def __str__(self) -> str:
        return f"refuted: {self.counterexample} (node {self.node})"


@dataclass(frozen=True, slots=True)
class Unknown:
    """No proof and no counterexample, because of `node`. Never to be treated as Proved."""

    reason: str
    node: str

    def __str__(self) -> str:
        return f"unknown: {self.reason} (node {self.node})"


Verdict = Proved | Refuted | Unknown

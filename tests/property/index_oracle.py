"""What a random program really writes, by running it; and whether the prover's verdict stands up to that."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, fx

from compiler_service.proof.algebra import Linear
from compiler_service.proof.certificate import WriteProof, prove_writes
from compiler_service.proof.program import CacheDecl, CacheNodes, Program
from compiler_service.proof.verdict import Proved, Refuted, Run
from tests.property.index_programs import CELLS, IndexProgram, world
from tests.support.proof.linear_values import value_of

NAME = "k_cache.0"
UNWRITTEN = -1.0
SAMPLES = ((1, 1), (2, 3), (3, 1), (5, 2), (8, 3))
"""(query length, rows) of each run."""


class Outcome(Enum):
    """What became of one program."""

    PROVED = "proved"
    NOT_A_RUN = "no run, not proved"
    MISSED = "a run, not proved"
    WRONGLY_REFUTED = "a run, refuted"
    UNSOUND = "proved, but no run"
    UNTESTED = "no sample inside the cache"


@dataclass(frozen=True, slots=True)
class Judgement:
    outcome: Outcome
    verdict: object
    detail: str = ""


def prove(program: IndexProgram) -> WriteProof:
    nodes = CacheNodes(CacheDecl("cache", layer=0), program.cache.node, program.written)
    # The written value is an output as well, which counts as somebody reading it.
    whole = Program(program.graph, {NAME: nodes}, (program.written,), program.constants, {}, {})
    return prove_writes(whole)[NAME]


def judge(program: IndexProgram, seed: int) -> Judgement:
    """Run the program for many sizes and starts, and compare with the verdict."""
    proof = prove(program)
    verdict = proof.verdict
    samples = list(_samples(program, random.Random(seed)))
    inside = [sample for sample in samples if sample.inside]
    if isinstance(verdict, Proved):
        if proof.update_axes != program.update_axes and program.update.shape[2].const != 1:
            return Judgement(Outcome.UNSOUND, verdict, f"update axes {proof.update_axes}")
        for sample in samples:
            problem = sample.contradicts(verdict.run)
            if problem:
                return Judgement(Outcome.UNSOUND, verdict, problem)
        return Judgement(Outcome.PROVED if inside else Outcome.UNTESTED, verdict)
    if len(inside) < 3:
        return Judgement(Outcome.UNTESTED, verdict)
    if not all(sample.is_run for sample in inside):
        return Judgement(Outcome.NOT_A_RUN, verdict)
    return Judgement(Outcome.WRONGLY_REFUTED if isinstance(verdict, Refuted) else Outcome.MISSED, verdict)


@dataclass(slots=True)
class Sample:
    """One execution: every node's value, and the cache afterwards (None: torch refused the index)."""

    program: IndexProgram
    n: int
    rows: int
    values: dict[str, Any]
    after: Tensor | None

    @property
    def cells(self) -> Tensor | None:
        """The index, `[rows or 1, length]`."""
        if self.program.index is None:
            return None
        found: Tensor = self.values[self.program.index.node.name]
        return found.reshape(1, -1) if found.ndim <= 1 else found.reshape(-1, found.shape[-1])

    @property
    def inside(self) -> bool:
        """Whether the write stays in the cache, which the host checks before a launch."""
        return self.after is not None and (self.cells is None or bool((self.cells >= 0).all()))

    @property
    def rows_first(self) -> Tensor:
        """The update as `[rows, heads, length, head_dim]`."""
        update: Tensor = self.values["update"]
        axes = self.program.update_axes
        if None in axes:
            update, axes = update.unsqueeze(2), (0, 1, 2, 3)
        return update.permute([axis for axis in axes if axis is not None])

    @property
    def is_run(self) -> bool:
        """Whether some start for each row explains the whole outcome."""
        assert self.after is not None
        update = self.rows_first
        if update.shape[:2] + update.shape[3:] != self.after.shape[:2] + self.after.shape[3:]:
            return False
        touched = (self.after != UNWRITTEN).any(dim=1).any(dim=2)
        for row, new in enumerate(update):
            first = int(touched[row].nonzero()[0]) if touched[row].any() else 0
            if not torch.equal(self.after[row], _block(self.after[row], new, first)):
                return False
        return True

    def contradicts(self, run: Run) -> str:
        """How this execution differs from the proven run; empty if it does not."""
        cells = self.cells
        if cells is not None and cells.shape[1] > 1 and bool((cells.diff(dim=1) != 1).any()):
            return f"n={self.n} rows={self.rows}: the cells are {cells.tolist()}"
        if self._value(run.length, 0) != self.rows_first.shape[2]:
            return f"n={self.n}: the length is {self.rows_first.shape[2]}, not {run.length}"
        if not self.inside or self.after is None:
            return ""
        for row, (after, new) in enumerate(zip(self.after, self.rows_first, strict=True)):
            start = self._value(run.start, row)
            if start is None:
                assert cells is not None
                start = int(cells[min(row, len(cells) - 1), 0])
            if not torch.equal(after, _block(after, new, start)):
                return f"n={self.n} rows={self.rows}: row {row} is not written from {run.start} = {start} on"
        return ""

    def _value(self, linear: Linear, row: int) -> int | None:
        sizes = {str(world().n): self.n, str(world().rows): self.rows}
        return value_of(linear, row=row, sizes=sizes, values=self.values)


def _block(before: Tensor, new: Tensor, start: int) -> Tensor:
    """An unwritten cache row with `new` `[heads, length, head_dim]` from cell `start` on."""
    row = torch.full_like(before, UNWRITTEN)
    if 0 <= start <= CELLS - new.shape[1]:
        row[:, start : start + new.shape[1]] = new
    return row


def _samples(program: IndexProgram, rng: random.Random) -> Iterator[Sample]:
    for n, rows in SAMPLES:
        values: dict[str, Any] = {}
        after: Tensor | None = None
        try:
            after = _execute(program, _inputs(program, n, rows, rng), values)
        except (IndexError, RuntimeError) as error:
            if "out of" not in str(error) and "bounds" not in str(error) and "range" not in str(error):
                raise
        yield Sample(program, n, rows, values, after)


def _inputs(program: IndexProgram, n: int, rows: int, rng: random.Random) -> dict[str, Tensor]:
    found = {}
    for name, value in program.inputs.items():
        shape = [size.at(n, rows) for size in value.shape]
        if name in program.constants:
            found[name] = program.constants[name]
        elif name == "cache":
            found[name] = torch.full(shape, UNWRITTEN)
        elif name == "update":
            found[name] = torch.arange(1, 1 + math.prod(shape), dtype=torch.float32).reshape(shape)
        else:
            top = rng.choice((3, 12, 30))
            count = math.prod(shape)
            found[name] = torch.tensor(rng.choices(range(top + 1), k=count), dtype=value.dtype).reshape(shape)
    return found


def _execute(program: IndexProgram, inputs: dict[str, Tensor], values: dict[str, Any]) -> Tensor:
    values.update(inputs)
    for node in program.graph.nodes:
        if node.op == "call_function":
            result = values[node.name] = node.target(*[_filled(arg, values) for arg in node.args], **node.kwargs)
            if isinstance(result, Tensor):
                assert result.dtype == node.meta["val"].dtype, f"{node.format_node()} makes {result.dtype}"
    written: Tensor = values[program.written.name]
    return written


def _filled(arg: Any, values: dict[str, Any]) -> Any:
    if isinstance(arg, fx.Node):
        return values[arg.name]
    return [_filled(item, values) for item in arg] if isinstance(arg, list | tuple) else arg

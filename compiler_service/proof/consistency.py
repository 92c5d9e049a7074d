"""The second proof: attention must look at the cells the write wrote.

A contiguous write can still be wrong: with a frozen start in the mask the write moves on and the mask does not. So the start
that decides what each query sees must be the start of the run, row by row, for K and V alike.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from compiler_service.proof import rules
from compiler_service.proof.algebra import Coord, Grid, Linear
from compiler_service.proof.evaluate import Values, bind
from compiler_service.proof.hazards import new_readers
from compiler_service.proof.program import Program
from compiler_service.proof.verdict import Refuted, Run, Unknown


def find_inconsistency(program: Program, values: Values, runs: Mapping[str, Run], name: str) -> Refuted | Unknown | None:
    """Why the attention over cache `name` does not follow its write, or None if it does."""
    cache, run = program.caches[name], runs[name]
    for reader in new_readers(cache):
        if str(reader.target) == rules.ATTEND:
            found = _attend(values, reader, run) or _partners(program, runs, name, reader)
            if found is not None:
                return found
    return None


def _attend(values: Values, attend: fx.Node, run: Run) -> Refuted | Unknown | None:
    arguments = bind(attend)
    start, query = arguments["start"], arguments["q"]
    assert isinstance(start, fx.Node)
    assert isinstance(query, fx.Node)
    seen = per_row(values.grid(start))
    if seen is None:
        return Unknown(f"the start of {attend.name} is no start for each row", attend.name)
    if seen != run.start:
        return Refuted(f"{run.cache} is written from {run.start} on, {attend.name} masks from {seen} on", attend.name)
    queries = values.shape(query)[2]
    if queries != run.length:
        return Refuted(f"{run.cache} gets {run.length} new cells, {attend.name} has {queries} queries", attend.name)
    return None


def _partners(program: Program, runs: Mapping[str, Run], name: str, attend: fx.Node) -> Refuted | None:
    """K and V of one attention belong to one layer and start together."""
    arguments = bind(attend)
    for other, cache in program.caches.items():
        if other == name or cache.new not in (arguments["k_cache"], arguments["v_cache"]):
            continue
        if cache.decl.layer != program.caches[name].decl.layer:
            return Refuted(f"{attend.name} reads {name} together with {other} of another layer", attend.name)
        if other in runs and runs[other].start != runs[name].start:
            return Refuted(f"{name} starts at {runs[name].start}, {other} at {runs[other].start}", attend.name)
    return None


def per_row(start: Grid) -> Linear | None:
    """A start tensor of shape `[]`, `[1]` or `[B]` as a start with its row on axis 0; None for another shape."""
    if start.rank > 1 or any(start.steps):
        return None
    return start.base.with_coords(lambda c: Coord(0, c.offset) if c.axis is not None else c) if start.rank else start.base

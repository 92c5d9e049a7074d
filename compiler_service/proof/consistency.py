"""The second proof: attention must look at the cells the write wrote.

A contiguous write can still be wrong: with a frozen start in the mask the write moves on and the mask does not. So the start
that decides what each query sees must be the start of the run, row by row, for K and V alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from compiler_service.proof import algebra, rules
from compiler_service.proof.algebra import ONE, ZERO, Linear
from compiler_service.proof.attention import Attention, attentions_over
from compiler_service.proof.evaluate import Values, bind
from compiler_service.proof.masks import Bound, visible_where
from compiler_service.proof.program import Program
from compiler_service.proof.verdict import Refuted, Run, Unknown
from compiler_service.proof.writes import Write

Objection = Refuted | Unknown


@dataclass(frozen=True, slots=True)
class Readers:
    """The attentions over each cache of a program, by cache name."""

    over: Mapping[str, Sequence[Attention]]

    def of(self, attention: Attention) -> dict[str, Attention]:
        """Every cache that `attention` reads, and how."""
        return {name: mine for name, found in self.over.items() for mine in found if mine.node is attention.node}


def find_readers(writes: Mapping[str, Write]) -> Readers:
    return Readers({name: attentions_over(write.contents) for name, write in writes.items()})


def find_inconsistency(program: Program, values: Values, runs: Mapping[str, Run], readers: Readers, name: str) -> Objection | None:
    """Why the attention over cache `name` does not follow its write, or None if it does (or no attention reads it)."""
    for attention in readers.over[name]:
        found = _attention(program, values, readers, attention, runs[name]) or _partners(program, readers, runs, name, attention)
        if found is not None:
            return found
    return None


def _attention(program: Program, values: Values, readers: Readers, attention: Attention, run: Run) -> Objection | None:
    node = attention.node
    if not attention.is_known:
        return Unknown(f"{node.name} ({node.target}) reads {run.cache}, and how it masks is not known", node.name)
    if str(node.target) in rules.SOFTMAX and not attention.is_keys:
        # Values are weighed by the softmax over the keys, so the keys' mask is theirs.
        keys = [mine for mine in readers.of(attention).values() if mine.is_keys]
        if not keys:
            return Unknown(f"the keys that weigh {run.cache} in {node.name} are in no cache", node.name)
        attention = keys[0]
    queries = values.shape(attention.queries)[-2]
    if queries != run.length:
        return Refuted(f"{run.cache} gets {run.length} new cells, {node.name} has {queries} queries", node.name)
    if str(node.target) == rules.ATTEND:
        return _attend(values, node, run)
    return _masked(program, values, attention, run)


def _attend(values: Values, attend: fx.Node, run: Run) -> Objection | None:
    start = bind(attend)["start"]
    assert isinstance(start, fx.Node)
    grid = values.grid(start)
    seen = algebra.per_row(grid, 0 if grid.rank else None) if grid.rank <= 1 else None
    if seen is None:
        return Unknown(f"the start of {attend.name} is no start for each row", attend.name)
    return _same_start(run, seen, attend)


def _masked(program: Program, values: Values, attention: Attention, run: Run) -> Objection | None:
    node = attention.node
    cache = values.shape(program.caches[run.cache].old)
    cells = cache[run.axis]
    if attention.is_causal:
        return Refuted(f"{node.name} counts its causal mask from cell 0, {run.cache} is written from {run.start} on", node.name)
    if not attention.masks:
        return Refuted(f"{node.name} has no mask: it sees all {cells} cells, written or not", node.name)
    conditions = read_conditions(program, values, attention, run)
    if not isinstance(conditions, list):
        return conditions
    if not any(seen.up_to_own for seen in conditions):
        return Unknown(f"the mask of {node.name} lets queries see cells after their own", node.name)
    return None


def read_conditions(program: Program, values: Values, attention: Attention, run: Run) -> list[Seen] | Objection:
    """What the masks of `attention` say, condition by condition; an objection where one follows another start than the write."""
    node, cache = attention.node, values.shape(program.caches[run.cache].old)
    readable = visible_where(program, values, attention.masks)
    if not readable:
        names = ", ".join(mask.node.name for mask in attention.masks)
        return Unknown(f"the mask {names} is no comparison of cells with start + query", node.name)
    conditions = []
    for bound in sorted((bound for found in readable for bound in found), key=lambda bound: bound.grid.steps[-1:]):
        seen = _read_bound(bound, run, cache, node)
        if not isinstance(seen, Seen):
            return seen
        conditions.append(seen)
    return conditions


@dataclass(frozen=True, slots=True)
class Seen:
    """What one condition of a mask lets query `i` see: cells up to its own, `start + i`; the `newest` so many of those up to it;
    those of its own `chunk` of so many; or, with none of these, every cell there is."""

    up_to_own: bool = False
    newest: int | None = None
    chunk: int | None = None


def _read_bound(condition: Bound, run: Run, cache: Sequence[Linear], node: fx.Node) -> Seen | Objection:
    """What one condition says about the cells a query sees; an objection where it follows another start than the write."""
    bound = condition.grid
    cells = cache[run.axis]
    if bound.rank < 2 or bound.shape[-1] not in (ONE, cells) or bound.shape[-2] not in (ONE, run.length):
        return Unknown(f"the mask of {node.name} is not [.., queries, cells]", node.name)
    cell, query = bound.rank - 1, bound.rank - 2
    base = algebra.per_row(algebra.select(algebra.select(bound, cell, ZERO), query, ZERO), 0 if bound.rank == len(cache) else None)
    if base is None or bound.base.varies_along(cell) or bound.base.varies_along(query):
        return Unknown(f"the mask of {node.name} differs between heads, or is no straight line over queries and cells", node.name)
    slope = (bound.steps[query] if run.length != ONE else -bound.steps[cell], bound.steps[cell])
    if condition.chunk is not None:  # cell and base + query lie in one chunk
        if slope != (1, -1):
            return Unknown(f"the mask of {node.name} compares chunks of something else than cells and queries", node.name)
        whole = cells.is_constant and cells.const <= condition.chunk
        return _same_start(run, base, node) or Seen(chunk=None if whole else condition.chunk)
    if slope == (1, -1):  # cell <= base + query
        return _same_start(run, base, node) or Seen(up_to_own=True)
    if slope == (-1, 1):  # cell >= query - base
        window = base + run.start
        if not window.is_constant:
            return _differs(run, window, f"the window of {node.name} follows {base.scaled(-1)}", node)
        hides_itself = Refuted(f"the window of {node.name} hides a query's own cell", node.name)
        return Seen(newest=window.const + 1) if window.const >= 0 else hides_itself
    if slope == (0, -1) and ((base - cells + ONE).is_nonnegative or base == run.start + run.length - ONE):
        return Seen()  # cell < max_len, or cell < start + length
    if slope == (0, 1) and base.is_nonnegative:
        return Seen()  # cell >= 0
    return Unknown(f"the mask of {node.name} holds a condition that is neither causal nor a window", node.name)


def _same_start(run: Run, seen: Linear, node: fx.Node) -> Objection | None:
    difference = run.start - seen
    return None if difference == ZERO else _differs(run, difference, f"{node.name} masks from {seen} on", node)


def _differs(run: Run, difference: Linear, what: str, node: fx.Node) -> Objection:
    """Refuted where inputs can pull the two starts apart, Unknown where they may be the same value by other means."""
    told = f"{run.cache} is written from {run.start} on, {what}"
    return Refuted(told, node.name) if difference.is_given else Unknown(f"{told}, which may be another cell", node.name)


def _partners(program: Program, readers: Readers, runs: Mapping[str, Run], name: str, attention: Attention) -> Objection | None:
    """K and V of one attention belong to one layer and start together."""
    node = attention.node
    for other in readers.of(attention):
        if program.caches[other].decl.layer != program.caches[name].decl.layer:
            return Refuted(f"{node.name} reads {name} together with {other} of another layer", node.name)
        if other in runs and runs[other].start != runs[name].start:
            return Refuted(f"{name} is written from {runs[name].start} on, {other} from {runs[other].start} on", node.name)
    return None

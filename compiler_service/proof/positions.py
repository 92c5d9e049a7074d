"""Positions fed to rotary embeddings: the declared logical positions, or the cells themselves where none are declared.

Positions and cells part ways once a cache has been compacted, so a program that declares logical positions must rotate by
them. A program without that input rotates by the cells, and then they must be those that the write fills.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from compiler_service.proof import algebra, rules
from compiler_service.proof.algebra import ONE, ZERO, Coord, Grid, Linear, Term
from compiler_service.proof.evaluate import Values
from compiler_service.proof.program import Program
from compiler_service.proof.verdict import Refuted, Run, Unknown
from shared.bindings import POSITION_IDS


def find_wrong_positions(program: Program, values: Values, update: fx.Node, run: Run) -> Refuted | Unknown | None:
    """Why the rows `update` were rotated by other positions than they should be; None if they are right or not rotated."""
    declared = any(node.name == POSITION_IDS for node in program.graph.find_nodes(op="placeholder"))
    for angles in _rotations_of(update):
        for source in _integers_under(values, angles):
            grid = values.grid(source)
            if not grid.varying_axes and not (run.length == ONE or grid.rank > 1):
                continue  # one number for all tokens selects frequencies, it is no position
            wrong = _against_declared(grid, source, run) if declared else _against_run(grid, source, run)
            if wrong is not None:
                return wrong
    return None


def _against_declared(grid: Grid, source: fx.Node, run: Run) -> Refuted | Unknown | None:
    """Token `i` of row `b` must be rotated by element `[b, i]` of the input."""
    index = _row_and_token(grid, run)
    if index and not any(grid.steps) and grid.base == Linear.of(0, [(Term(POSITION_IDS, index, given=True), 1)]):
        return None
    told = f"rows are rotated by {_shown(grid)} (node {source.name}), not by the input {POSITION_IDS}"
    return Refuted(told, source.name) if grid.base.is_given else Unknown(told, source.name)


def _row_and_token(grid: Grid, run: Run) -> tuple[Coord, ...]:
    """The coordinates of an element's own row and token, which lie along the axes that vary; empty if those are others."""
    open_sizes = [size for size in (run.rows, run.length) if not algebra.is_single(size)]
    axes = iter(grid.varying_axes)
    if [grid.shape[axis] for axis in grid.varying_axes] != open_sizes:
        return ()
    return tuple(Coord(None if algebra.is_single(size) else next(axes), ZERO) for size in (run.rows, run.length))


def _against_run(grid: Grid, source: fx.Node, run: Run) -> Refuted | Unknown | None:
    base = grid.base.with_coords(lambda c: Coord(0, c.offset) if c.axis is not None else c)
    stepped = [axis for axis, step in enumerate(grid.steps) if step]
    by_token = [(grid.steps[axis], grid.shape[axis]) for axis in stepped] == [(1, run.length)]
    counted = by_token or (not stepped and run.length == ONE)
    if counted and base == run.start:
        return None
    told = f"rows are rotated by {_shown(grid)} (node {source.name}), {run.cache} is written from {run.start} on"
    return Refuted(told, source.name) if counted and (base - run.start).is_given else Unknown(told, source.name)


def _shown(grid: Grid) -> str:
    return f"{grid.base}{''.join(f' + {step}*i' for step in grid.steps if step)}"


def _rotations_of(update: fx.Node) -> Iterator[fx.Node]:
    """The cosines and sines that an update is made of, not counting those inside earlier layers."""
    for node in _backwards([update], stop=rules.MATMUL | rules.SDPA | rules.SOFTMAX):
        if str(node.target) in rules.ANGLES:
            yield node


def _integers_under(values: Values, angles: fx.Node) -> Iterator[fx.Node]:
    """The integer tensors that an angle is computed from."""
    pending, seen = list(angles.all_input_nodes), set(angles.all_input_nodes)
    while pending:
        node = pending.pop()
        if values.is_integer(node):
            if hasattr(node.meta["val"], "dtype"):
                yield node
            continue
        fresh = [source for source in node.all_input_nodes if source not in seen]
        seen.update(fresh)
        pending += fresh


def _backwards(nodes: list[fx.Node], stop: frozenset[str]) -> Iterator[fx.Node]:
    pending, seen = list(nodes), set(nodes)
    while pending:
        node = pending.pop()
        yield node
        if str(node.target) in stop:
            continue
        fresh = [source for source in node.all_input_nodes if source not in seen]
        seen.update(fresh)
        pending += fresh

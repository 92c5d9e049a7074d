"""What can be said about a run and the end of the cache before anything runs.

A start that is a value of the step is checked on the host before every launch (`0 <= start`, `start + length <= max_len`); a
start written into the program, and the longest run a profile asks for, are checked here.
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy
from torch.utils._sympy.numbers import int_oo

from compiler_service.proof.algebra import Linear
from compiler_service.proof.evaluate import Values
from compiler_service.proof.program import CacheNodes, Program
from compiler_service.proof.verdict import Refuted, Run
from shared.bindings import INPUT_IDS
from shared.profiles import OptimizationProfile


def find_overrun(
    program: Program, values: Values, cache: CacheNodes, run: Run, node: str, profiles: Sequence[OptimizationProfile]
) -> Refuted | None:
    """The counterexample in which the run leaves the cache, if the program or a profile already contains one."""
    size = values.shape(cache.old)[run.axis]
    max_len = size.const if size.is_constant else cache.decl.max_len
    assert max_len is not None, "read_write refuses a cache of unknown length"
    first = run.start.const if run.start.is_constant else 0
    if first < 0:
        return Refuted(f"the run starts at cell {first}; a cache has cells 0..{max_len}", node)
    for name, longest in _longest(program, values, run.length, profiles):
        if first + longest > max_len:
            return Refuted(f"{name}: the run reaches cell {first + longest}; {run.cache} has cells 0..{max_len}", node)
    return None


def _longest(program: Program, values: Values, length: Linear, profiles: Sequence[OptimizationProfile]) -> list[tuple[str, int]]:
    """(whose wish, longest run) for every profile; the program's own bound when the profiles do not decide it."""
    if length.is_constant:
        return [("every step", length.const)]
    query_len = _query_len(program, values)
    by_profile = []
    for profile in profiles if query_len is not None else ():
        rest = length - query_len if query_len is not None else length
        if rest.is_constant:
            by_profile.append((f"profile {profile}", profile.query_len.max + rest.const))
    if by_profile:
        return by_profile
    bound = _upper_bound(program, length)
    return [] if bound is None else [(f"length {length}", bound)]


def _query_len(program: Program, values: Values) -> Linear | None:
    """The size every profile ranges over: axis 1 of the tokens."""
    for node in program.graph.find_nodes(op="placeholder"):
        if node.name == INPUT_IDS:
            return values.shape(node)[1]
    return None


def _upper_bound(program: Program, length: Linear) -> int | None:
    bounds = {program.size_names.get(symbol, str(symbol)): limits.upper for symbol, limits in program.sizes.items()}
    total = length.const
    for term, factor in length.terms:
        upper = bounds.get(term.source)
        if not term.symbol or factor < 0 or upper is None or upper == int_oo or not isinstance(upper, sympy.Integer | int):
            return None
        total += factor * int(upper)
    return total

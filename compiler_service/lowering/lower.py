"""The stages from an exported decoder to the program a backend builds. The proof stands between the two tuples."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from compiler_service.export.program import DecoderProgram
from compiler_service.lowering import spec
from compiler_service.lowering.passes.canonical_order import canonical_order
from compiler_service.lowering.passes.functionalize import functionalize
from compiler_service.lowering.passes.group_linears import group_linears
from compiler_service.lowering.passes.page_caches import page_caches
from compiler_service.lowering.passes.remove_dead_inputs import remove_dead_inputs
from compiler_service.lowering.passes.take_sizes_from_tokens import take_sizes_from_tokens


@dataclass(frozen=True, slots=True)
class Stage:
    """A rewrite and what must hold of its result."""

    rewrite: Callable[[DecoderProgram], DecoderProgram]
    rules: tuple[spec.Rule, ...]


PASSES = (
    Stage(functionalize, (spec.nothing_mutates, spec.only_caches_change)),
    Stage(remove_dead_inputs, (spec.nothing_mutates, spec.only_caches_change, spec.everything_is_read)),
    Stage(take_sizes_from_tokens, (spec.nothing_mutates, spec.only_caches_change, spec.everything_is_read)),
    Stage(canonical_order, (spec.nothing_mutates, spec.only_caches_change, spec.everything_is_read)),
)
"""From the export to the form the proof compares with it."""

PAGED_RULES = (spec.inputs_are_bindings, spec.everything_is_read, spec.pools_change_in_place)
POOL_PASSES = (Stage(group_linears, PAGED_RULES),)
"""From the proven program over pools, which `page_caches` makes, to the one a backend builds."""


def lower_to_linear(program: DecoderProgram) -> DecoderProgram:
    """The export in functional form: still the linear caches, still to be proven."""
    return _run(PASSES, program)


def has_own_attention(program: DecoderProgram) -> bool:
    """Whether the program's attention is quire::attend, as our own export's is."""
    return bool(program.program.graph.find_nodes(op="call_function", target=torch.ops.quire.attend.default))


def lower_to_pools(program: DecoderProgram, proven_writes: Collection[str]) -> DecoderProgram:
    """The proven linear program over pools, in the layout of its cache spec, ready for a backend.

    `proven_writes` names the write nodes of `program` whose runs are proven to start at `write_start`. WriteNotProven when a
    cache has another kind of write or another reader.
    """
    program = page_caches(program, proven_writes)
    spec.check(program, page_caches.__name__, PAGED_RULES)
    return _run(POOL_PASSES, program)


def _run(stages: tuple[Stage, ...], program: DecoderProgram) -> DecoderProgram:
    for stage in stages:
        program = stage.rewrite(program)
        spec.check(program, stage.rewrite.__name__, stage.rules)
    return program

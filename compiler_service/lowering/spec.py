"""What must hold of a program after each stage of lowering: rules over its graph, each naming the node that breaks it.

A broken rule is a bug of ours, so it is an InternalError; what a model may get wrong is refused by the pass that meets it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import fx
from torch.export.graph_signature import InputKind, OutputKind

from compiler_service.export.program import DecoderProgram
from shared.bindings import BLOCK_TABLE, INPUT_IDS, LAST_INDEX, POSITION_IDS, WRITE_START, pool_name
from shared.errors import InternalError

Rule = Callable[[DecoderProgram], Iterator[str]]
"""Yields one message for every node that breaks the rule."""

_PAGED_ATTEND = "quire.paged_attend.default"
_POOL_ARGUMENT = 3


def check(program: DecoderProgram, stage: str, rules: tuple[Rule, ...]) -> None:
    """InternalError listing every breach unless all `rules` hold of the program `stage` made."""
    if breaches := [breach for rule in rules for breach in rule(program)]:
        raise InternalError(f"after {stage}: {'; '.join(breaches)}")


def nothing_mutates(program: DecoderProgram) -> Iterator[str]:
    """The graph is functional: changes of inputs are outputs of the signature."""
    for node in _calls(program):
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            yield f"{node} mutates an argument"


def only_caches_change(program: DecoderProgram) -> Iterator[str]:
    """Every mutation is one of a cache input, and every cache has one."""
    signature = program.program.graph_signature
    changed = [spec for spec in signature.output_specs if spec.kind is not OutputKind.USER_OUTPUT]
    for spec in changed:
        if spec.kind is not OutputKind.USER_INPUT_MUTATION or "_cache." not in program.inputs.get(str(spec.target), ""):
            yield f"{spec.arg.name} changes {spec.target}, which is no cache"
    if len(changed) != 2 * program.cache.num_layers:
        yield f"{2 * program.cache.num_layers} caches should change, {len(changed)} do"


def everything_is_read(program: DecoderProgram) -> Iterator[str]:
    """No parameter and no buffer is passed in for nothing."""
    unread = {node.name for node in program.program.graph.find_nodes(op="placeholder") if not node.users}
    for spec in program.program.graph_signature.input_specs:
        if spec.kind is not InputKind.USER_INPUT and spec.arg.name in unread:
            yield f"nothing reads {spec.target}"


def inputs_are_bindings(program: DecoderProgram) -> Iterator[str]:
    """The user inputs are the tokens, the block table and one pool a layer, in order; adopted programs may take no positions."""
    positions = [POSITION_IDS] if POSITION_IDS in program.inputs.values() else []
    wanted = [INPUT_IDS, *positions, WRITE_START, LAST_INDEX, BLOCK_TABLE]
    wanted += [pool_name(layer) for layer in range(program.cache.num_layers)]
    got = [program.inputs.get(name, name) for name in program.program.graph_signature.user_inputs]
    if got != wanted:
        yield f"inputs should be {wanted}; they are {got}"


def pools_change_in_place(program: DecoderProgram) -> Iterator[str]:
    """Every pool is consumed by exactly one quire::paged_attend, and nothing else in the graph changes anything.

    This is the form Inductor keeps in place: a scatter or a copy feeding a mutation would move a whole pool a layer.
    """
    pools = {name for name, binding in program.inputs.items() if binding.startswith("kv_pool.")}
    for node in program.program.graph.find_nodes(op="placeholder"):
        if node.name in pools:
            users = list(node.users)
            if len(users) != 1 or str(users[0].target) != _PAGED_ATTEND or users[0].args[_POOL_ARGUMENT] is not node:
                yield f"{node} should be the pool of one quire::paged_attend; {[str(user) for user in users]} use it"
    for node in _calls(program):
        mutable = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        if mutable and (str(node.target) != _PAGED_ATTEND or str(node.args[_POOL_ARGUMENT]) not in pools):
            yield f"{node} changes something that is no pool"
    for spec in program.program.graph_signature.output_specs:
        if spec.kind is not OutputKind.USER_OUTPUT:
            yield f"{spec.arg.name} is copied into {spec.target}"


def _calls(program: DecoderProgram) -> Iterator[fx.Node]:
    return (node for node in program.program.graph.nodes if node.op == "call_function")

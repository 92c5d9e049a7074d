"""Rewrite the in-place cache writes as functional ones, so that what a step changes is a list in the program's signature.

    k1 = index_put_(k_cache, [rows, None, slots], new)   =>   k1 = index_put(k_cache, [rows, None, slots], new)
                                                              output k1 -> k_cache

The proof and the paging pass take this form; composite ops (linear, silu) stay whole, since the backend knows better how to
take them apart. Only the case our export makes is taken: every cache is written once, straight on the input, and whoever
reads it afterwards reads the write's result. torch's general functionalization would give the same at the price of two more
traces of the model. Left alone: a program that is functional already (adopt.py). Refused (WriteNotProven): any other in-place
op, and any other use of a written cache.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import fx
from torch._export.verifier import Verifier
from torch.export.graph_signature import ExportGraphSignature, OutputKind, OutputSpec, TensorArgument

from compiler_service.export.program import DecoderProgram
from compiler_service.lowering.rewrite import rebuild
from shared.errors import WriteNotProven

_SIZE = torch.ops.aten.sym_size.int


def functionalize(program: DecoderProgram) -> DecoderProgram:
    """The same step without a mutating op in its graph."""
    graph = copy.deepcopy(program.program.graph)
    writes = [node for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable]
    if not writes:
        return program
    mutations = []
    for write in writes:
        cache = write.args[0]
        if write.target is not torch.ops.aten.index_put_.default or not _is_cache(program, cache):
            raise WriteNotProven(f"only index_put_ on a cache may work in place; {write} is {write.target} on {cache}")
        if others := [user.name for user in cache.users if user is not write and user.target is not _SIZE]:
            raise WriteNotProven(f"{write} writes {cache} in place, which {', '.join(others)} reads too: which value is meant?")
        write.target = torch.ops.aten.index_put.default
        mutations.append(OutputSpec(OutputKind.USER_INPUT_MUTATION, TensorArgument(write.name), cache.name))
    (output,) = graph.find_nodes(op="output")
    output.args = ((*writes, *output.args[0]),)
    signature = program.program.graph_signature
    outputs = [*mutations, *signature.output_specs]
    functional = rebuild(program.program, graph, ExportGraphSignature(list(signature.input_specs), outputs), [Verifier])
    return replace(program, program=functional)


def _is_cache(program: DecoderProgram, node: object) -> bool:
    return isinstance(node, fx.Node) and node.op == "placeholder" and "_cache." in program.inputs.get(node.name, "")

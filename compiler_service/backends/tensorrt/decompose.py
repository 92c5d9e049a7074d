"""The linear program in the ops TensorRT's converters know; writes and attention stay whole, to be proven in this very form."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import fx
from torch.export.graph_signature import ExportGraphSignature, OutputKind, OutputSpec, TensorArgument

from compiler_service.backends.tensorrt.complex_numbers import without_complex_numbers
from compiler_service.backends.tensorrt.host import decompositions, without_gpu
from compiler_service.export.program import DecoderProgram
from compiler_service.lowering import spec
from compiler_service.lowering.passes.canonical_order import canonical_order
from compiler_service.lowering.passes.take_sizes_from_tokens import take_sizes_from_tokens
from compiler_service.lowering.rewrite import rebuild


def decompose(linear: DecoderProgram) -> DecoderProgram:
    """The same step. Its writes are to be proven again: decomposing renames and rewrites everything."""
    with without_gpu():
        program = linear.program.run_decompositions(decompositions())
    real = without_complex_numbers(_without_copies(replace(linear, program=program)))
    direct = canonical_order(take_sizes_from_tokens(real))
    spec.check(direct, decompose.__name__, (spec.nothing_mutates, spec.only_caches_change, spec.everything_is_read))
    return direct


def _without_copies(program: DecoderProgram) -> DecoderProgram:
    """Return the writes themselves: decomposing hands a changed input back as `copy(cache, write)`, which reads the old cache."""
    source = program.program
    graph = copy.deepcopy(source.graph)
    (output,) = graph.find_nodes(op="output")
    returned = list(output.args[0])
    specs = list(source.graph_signature.output_specs)
    for index, (node, out) in enumerate(zip(returned, specs, strict=True)):
        if out.kind is OutputKind.USER_INPUT_MUTATION and _is_copy(node):
            returned[index] = node.args[1]
            specs[index] = OutputSpec(out.kind, TensorArgument(node.args[1].name), out.target)
    output.args = (tuple(returned),)
    graph.eliminate_dead_code()
    signature = ExportGraphSignature(list(source.graph_signature.input_specs), specs)
    return replace(program, program=rebuild(source, graph, signature))


def _is_copy(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.copy.default and isinstance(node.args[1], fx.Node)

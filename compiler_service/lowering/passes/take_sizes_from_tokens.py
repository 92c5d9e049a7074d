"""Read batch and query length from `input_ids`, wherever the export read them from.

Tracing asks whichever input comes last for a shared size, often a cache. Caches leave the program when they become pools, and
whoever only wanted the batch must not count as a reader of theirs. Left alone: sizes that `input_ids` does not have.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from compiler_service.export.program import DecoderProgram
from compiler_service.lowering.rewrite import rebuild
from shared.bindings import INPUT_IDS


def take_sizes_from_tokens(program: DecoderProgram) -> DecoderProgram:
    """The same step, in which one node for each axis of `input_ids` is the only reader of that size."""
    source = program.program
    graph = copy.deepcopy(source.graph)
    placeholders = graph.find_nodes(op="placeholder")
    tokens = next(node for node in placeholders if node.name == program.placeholder(INPUT_IDS))
    reads = graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int)
    for axis, size in enumerate(tokens.meta["val"].shape):
        if same := [node for node in reads if str(node.meta["val"]) == str(size)]:
            with graph.inserting_after(placeholders[-1]):
                read = graph.call_function(torch.ops.aten.sym_size.int, (tokens, axis))
            read.meta = dict(same[0].meta)
            for node in same:
                node.replace_all_uses_with(read)
                graph.erase_node(node)
    return replace(program, program=rebuild(source, graph, source.graph_signature))

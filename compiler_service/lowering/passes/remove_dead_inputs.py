"""Drop parameters and buffers that nothing reads.

Tied weights leave a second parameter behind, rotary modules a copy of their first frequencies. Each would be a constant
that the engine has to be given and never looks at. User inputs stay: they are the engine's interface.
"""

from __future__ import annotations

import copy
from dataclasses import replace

from torch.export.graph_signature import ExportGraphSignature, InputKind

from compiler_service.export.program import DecoderProgram
from compiler_service.lowering.rewrite import rebuild

_REMOVABLE = (InputKind.PARAMETER, InputKind.BUFFER)


def remove_dead_inputs(program: DecoderProgram) -> DecoderProgram:
    """The same step without unread parameters and buffers, in the graph and in `weights` and `constants`."""
    source = program.program
    graph = copy.deepcopy(source.graph)
    unread = {node.name: node for node in graph.find_nodes(op="placeholder") if not node.users}
    kept = []
    for spec in source.graph_signature.input_specs:
        if spec.kind in _REMOVABLE and spec.arg.name in unread:
            graph.erase_node(unread[spec.arg.name])
        else:
            kept.append(spec)
    signature = ExportGraphSignature(kept, list(source.graph_signature.output_specs))
    read = {spec.target for spec in kept}
    return replace(
        program,
        program=rebuild(source, graph, signature),
        weights={name: tensor for name, tensor in program.weights.items() if name in read},
        constants={name: value for name, value in program.constants.items() if name in read},
    )

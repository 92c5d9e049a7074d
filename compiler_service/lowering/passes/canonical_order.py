"""Put the nodes in the order the outputs need them, and name them by that order.

Some models walk a set of layer kinds, so the same export lists the same nodes differently from process to process, and an
artifact key over the graph would too. The graph must be functional: then any order that respects the edges computes the same.
Assertions about what tracing saw are nobody's input and fall away with everything else that no output needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import fx
from torch.export.graph_signature import ExportGraphSignature, OutputSpec, TensorArgument

from compiler_service.export.program import DecoderProgram
from compiler_service.lowering.rewrite import rebuild


def canonical_order(program: DecoderProgram) -> DecoderProgram:
    """The same step; its text depends on what it computes alone."""
    source = program.program
    (output,) = source.graph.find_nodes(op="output")
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in source.graph.find_nodes(op="placeholder"):
        new[node] = graph.node_copy(node)
    for node in _in_order_of_need(output):
        if node not in new and node is not output:
            args = fx.map_arg(node.args, new.__getitem__)
            new[node] = graph.create_node(node.op, node.target, args, fx.map_arg(node.kwargs, new.__getitem__))
            new[node].meta = dict(node.meta)
    graph.output(fx.map_arg(output.args[0], new.__getitem__))
    name_of = {before.name: after.name for before, after in new.items()}
    outputs = [
        OutputSpec(spec.kind, TensorArgument(name_of[spec.arg.name]), spec.target) for spec in source.graph_signature.output_specs
    ]
    signature = ExportGraphSignature(list(source.graph_signature.input_specs), outputs)
    return replace(program, program=rebuild(source, graph, signature))


def _in_order_of_need(root: fx.Node) -> Iterator[fx.Node]:
    """Every node `root` depends on, each after its own inputs, inputs in the order of the arguments; `root` last."""
    seen: set[fx.Node] = set()
    stack = [(root, iter(root.all_input_nodes))]
    while stack:
        node, inputs = stack[-1]
        pending = next((child for child in inputs if child not in seen), None)
        if pending is not None:
            seen.add(pending)
            stack.append((pending, iter(pending.all_input_nodes)))
        else:
            stack.pop()
            yield node

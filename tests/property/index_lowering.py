"""What lowering does to an index program: constants folded, index_copy turned into index_put; and the real torch.export."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram, export

from compiler_service.proof.program import CacheDecl
from tests.property.index_programs import IndexProgram, Size, Value, aten

DECLARED = {"k_cache.0": CacheDecl("cache", layer=0)}
_IN_PLACE = {
    aten.index_copy.default: aten.index_copy_.default,
    aten.index_put.default: aten.index_put_.default,
    aten.scatter.src: aten.scatter_.src,
}
_VIEWED = {aten.slice_scatter.default: aten.slice.Tensor, aten.select_scatter.default: aten.select.int}


def lowered(program: IndexProgram) -> IndexProgram:
    """The same program with every integer tensor that no input decides as a frozen constant."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    nodes = list(program.graph.nodes)
    folded: dict[fx.Node, Tensor] = {}
    for node in nodes:
        operands = node.all_input_nodes
        if node.name in program.constants:
            folded[node] = program.constants[node.name]
        elif node.op == "call_function" and all(operand in folded for operand in operands):
            args = fx.node.map_arg(node.args, folded.__getitem__)
            folded[node] = node.target(*args, **node.kwargs)
    constants, frozen = {}, {}
    for node, tensor in folded.items():
        if any(user not in folded for user in node.users):
            name = f"_frozen_param{len(constants)}"
            copies[node] = graph.placeholder(name)
            copies[node].meta["val"] = node.meta["val"]
            constants[name] = tensor
            frozen[name] = Value(copies[node], tuple(map(Size, tensor.shape)), tensor.dtype)
    for node in nodes:
        if node in folded or node.op == "output":
            continue
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if node.target is aten.index_copy.default:
            cache, axis, index, update = copies[node].args
            copies[node].target = aten.index_put.default
            copies[node].args = (cache, [None] * (axis % 4) + [index], update)
    graph.output((copies[program.written],))
    kept = {name: value for name, value in program.inputs.items() if value.node in copies}
    moved = {name: Value(copies[value.node], value.shape, value.dtype) for name, value in kept.items()}
    index = program.index and copies.get(program.index.node)
    return replace(
        program,
        graph=graph,
        cache=moved["cache"],
        update=moved["update"],
        written=copies[program.written],
        index=program.index and index and Value(index, program.index.shape, program.index.dtype),
        constants=constants,
        inputs=moved | frozen,
    )


class _InPlace(nn.Module):
    """The program as a model would have it: its constants are attributes and it writes the cache in place."""

    def __init__(self, program: IndexProgram) -> None:
        super().__init__()
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        root = nn.Module()
        for node in program.graph.nodes:
            if node.name in program.constants:
                root.register_buffer(node.name, program.constants[node.name])
                copies[node] = graph.get_attr(node.name)
            elif node is program.written:
                copies[node] = self._write(graph, node, copies)
            elif node.op != "output":
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(graph.call_function(aten.sum.default, (copies[program.written],)))
        self.body = fx.GraphModule(root, graph)
        self.names = [name for name in program.inputs if name not in program.constants]

    @staticmethod
    def _write(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> fx.Node:
        args = fx.node.map_arg(node.args, copies.__getitem__)
        if node.target in _IN_PLACE:
            return graph.call_function(_IN_PLACE[node.target], args)
        cache, update, *where = args
        view = graph.call_function(_VIEWED[node.target], (cache, *where))
        graph.call_function(aten.copy_.default, (view, update))
        return cache

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        order = [node.target for node in self.body.graph.find_nodes(op="placeholder")]
        result: Tensor = self.body(*[inputs[name] for name in order])
        return result


class _Flat(nn.Module):
    """`cache` first and by name, so that the export calls its placeholder that."""

    def __init__(self, program: IndexProgram) -> None:
        super().__init__()
        self.inner = _InPlace(program)

    def forward(self, cache: Tensor, others: dict[str, Tensor]) -> Tensor:
        result: Tensor = self.inner({"cache": cache, **others})
        return result


def exported(program: IndexProgram) -> ExportedProgram:
    """The program through torch.export, query length and rows dynamic. Errors are torch's."""
    n, rows = Dim("n", min=2, max=40), Dim("rows", min=2, max=8)
    others, dynamic = {}, {}
    cache = None
    for name, value in program.inputs.items():
        if name in program.constants:
            continue
        example = torch.zeros([size.at(6, 3) for size in value.shape], dtype=value.dtype)
        axes = {axis: n if size.n else rows for axis, size in enumerate(value.shape) if (size.n or size.rows) and not size.const}
        if name == "cache":
            cache = (example, axes)
        else:
            others[name], dynamic[name] = example, axes
    assert cache is not None
    return export(_Flat(program), (cache[0], others), dynamic_shapes=(cache[1], dynamic), strict=False)

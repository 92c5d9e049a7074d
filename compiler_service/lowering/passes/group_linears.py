"""Rewrite the projections of one input as one `quire::linears`.

    q, k, v = linear(h, wq), linear(h, wk), linear(h, wv)    =>    q, k, v = quire::linears(h, [wq, wk, wv])

A decode step reads every weight once for a few rows. Inductor hands each product to the matrix library by itself, which is
slow for two to eight rows and starts its threads once a product; the op reads the weights of a group in one parallel region.
Left alone: projections with a bias, and weights that are computed.
"""

from __future__ import annotations

import copy
import operator
from dataclasses import replace

import torch
from torch import fx

from compiler_service.export.program import DecoderProgram
from compiler_service.lowering.rewrite import rebuild
from shared.kernels.linear.ops import load_ops


def group_linears(program: DecoderProgram) -> DecoderProgram:
    """The same step; every bias-free projection by a weight of the model is part of a quire::linears."""
    load_ops()
    graph = copy.deepcopy(program.program.graph)
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default):
        if len(node.args) == 2 and node.args[1].op == "placeholder":
            groups.setdefault(node.args[0], []).append(node)
    for x, members in groups.items():
        with graph.inserting_before(members[0]):
            grouped = graph.call_function(torch.ops.quire.linears.default, (x, [node.args[1] for node in members]))
            grouped.meta["val"] = [node.meta["val"] for node in members]
            for index, node in enumerate(members):
                part = graph.call_function(operator.getitem, (grouped, index))
                part.meta["val"] = node.meta["val"]
                node.replace_all_uses_with(part)
                graph.erase_node(node)
    return replace(program, program=rebuild(program.program, graph, program.program.graph_signature))

"""A functional graph with its caches named: the only form of a program the prover reads.

An exported program in torch's training IR writes in place (`index_copy_`), where a value depends on what ran before it. Such a
program is made functional first, without decomposing anything: then every node has one value, and the new content of a cache
is a node like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import sympy
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils._sympy.value_ranges import ValueRanges

from compiler_service.ingest.program_caches import stored_tensor
from shared.bindings import INPUT_IDS

ROW_AXIS = 0
"""The axis of a cache whose every index is one sequence."""


@dataclass(frozen=True, slots=True)
class CacheDecl:
    """Where a cache lives in an exported program and which axis holds the cells of a row.

    `target` is the qualified name of a buffer, or the name of a user input. `layer` groups the K and V that one attention
    reads. `max_len` is the length of the sequence axis where the program leaves it open.
    """

    target: str
    layer: int
    max_len: int | None = None
    seq_axis: int = 2


@dataclass(frozen=True, slots=True)
class CacheNodes:
    """`old` is the placeholder with the content before the step; `new` the node whose value is written back, None if none is."""

    decl: CacheDecl
    old: fx.Node
    new: fx.Node | None


@dataclass(frozen=True, slots=True)
class Program:
    """`outputs` are the user's. `constants` are the tensors whose values are fixed, by placeholder or get_attr node name.
    `sizes` bounds the size symbols; `size_names` are the ones people know them by."""

    graph: fx.Graph
    caches: Mapping[str, CacheNodes]
    outputs: tuple[fx.Node, ...]
    constants: Mapping[str, Tensor]
    sizes: Mapping[sympy.Symbol, ValueRanges[sympy.Expr]]
    size_names: Mapping[sympy.Symbol, str]


def is_functional(graph: fx.Graph) -> bool:
    return not any(isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable for node in graph.nodes)


def read_program(exported: ExportedProgram, caches: Mapping[str, CacheDecl]) -> Program:
    """The functional form of `exported`.

    KeyError names a cache whose target is neither a buffer nor a user input, ValueError two caches with one target.
    """
    targets = [decl.target for decl in caches.values()]
    if len(set(targets)) != len(targets):
        raise ValueError(f"every cache needs a target of its own, got {dict(zip(caches, targets, strict=True))}")
    if not is_functional(exported.graph):
        exported = exported.run_decompositions({})
    signature = exported.graph_signature
    nodes = {node.name: node for node in exported.graph.nodes}
    old: dict[str, fx.Node] = {}
    for inp in signature.input_specs:
        if inp.kind is InputKind.USER_INPUT and getattr(inp.arg, "name", None) in nodes:
            old.setdefault(inp.arg.name, nodes[inp.arg.name])
    for inp in signature.input_specs:
        if inp.kind is InputKind.BUFFER and inp.target is not None:
            old[inp.target] = nodes[inp.arg.name]
    new: dict[str, fx.Node] = {}
    outputs: list[fx.Node] = []
    for out in signature.output_specs:
        node = nodes.get(getattr(out.arg, "name", ""))
        if node is None:
            continue
        if out.kind in (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION) and out.target is not None:
            new[out.target] = node
        else:
            outputs.append(node)
    sites = {}
    for name, decl in caches.items():
        if decl.target not in old:
            raise KeyError(f"cache {name}: the program has no buffer and no input named {decl.target!r}; it has {sorted(old)}")
        sites[name] = CacheNodes(decl, old[decl.target], new.get(decl.target))
    return Program(
        graph=exported.graph,
        caches=sites,
        outputs=tuple(outputs),
        constants=_constants(exported, written=set(new)),
        sizes=exported.range_constraints,
        size_names=_size_names(exported.graph, sites.values()),
    )


def _size_names(graph: fx.Graph, caches: Iterable[CacheNodes]) -> dict[sympy.Symbol, str]:
    """What the open sizes of the tokens and the caches are called, where they have a symbol of their own."""
    tokens = [node for node in graph.find_nodes(op="placeholder") if node.name == INPUT_IDS]
    axes = [(node, axis, name) for node in tokens for axis, name in enumerate(("batch", "query_len"))]
    axes += [(cache.old, cache.decl.seq_axis, "max_len") for cache in caches]
    names: dict[sympy.Symbol, str] = {}
    for node, axis, name in axes:
        size = node.meta["val"].shape[axis]
        if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol) and name not in names.values():
            names.setdefault(size.node.expr, name)
    return names


def _constants(exported: ExportedProgram, written: set[str]) -> dict[str, Tensor]:
    """Tensors a run cannot change: lifted constants and buffers that nothing in the program writes."""
    found: dict[str, Tensor] = {}
    for spec in exported.graph_signature.input_specs:
        tensor = stored_tensor(exported, spec)
        if tensor is not None and spec.target not in written:
            found[spec.arg.name] = tensor
    for node in exported.graph.nodes:
        if node.op == "get_attr":
            value = getattr(exported.graph_module, str(node.target), None)
            if isinstance(value, Tensor):
                found[node.name] = value
    return {name: tensor for name, tensor in found.items() if not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"}

"""Rewrite every proven pair of cache writes and the attention that reads them as one `quire::paged_attend` on a pool.

    k1 = index_put(k_cache, [rows, None, slots], k^T)        the run [start, start + n) of every row: proven
    v1 = index_put(v_cache, [rows, None, slots], v^T)
    o  = quire::attend(q, k1, v1, start, ...)                sees cells j <= start + i
    =>
    o  = quire::paged_attend(q, k, v, pool, block_table, start, page_dim, ...)

A proven run is described by its start alone, so `start` and a block table say where the rows of a pool go; rows and slots
fall away. The caches stop being inputs; the block table and the pools (`kv_pool.{i}`) take their place. Both layouts are
served: they differ in `page_dim`. Left alone: everything else. Refused (WriteNotProven): a cache that anything but its one
write reads, a written cache that anything but its attention reads, a write without a proof, a start that is not the
program's `write_start`.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import SymInt, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, OutputKind, TensorArgument

from compiler_service.export.program import DecoderProgram
from compiler_service.lowering.rewrite import rebuild_in_place, sample_of
from compiler_service.lowering.symbols import new_size
from shared.bindings import BLOCK_TABLE, INPUT_IDS, WRITE_START, cache_name, pool_name
from shared.errors import WriteNotProven
from shared.kv_spec import KVCacheSpec, Layout

_SAMPLE_PAGES = 5
_MAX_POOL_PAGES = (1 << 31) - 1
"""Page ids are int32."""


@dataclass(frozen=True, slots=True)
class _CachedAttention:
    """The two writes of a layer and the attention over them, as nodes of one graph."""

    k_write: fx.Node
    v_write: fx.Node
    attend: fx.Node


def page_caches(program: DecoderProgram, proven: Collection[str]) -> DecoderProgram:
    """The step over pools. `proven` names the write nodes whose runs are proven contiguous from `write_start` on."""
    graph = copy.deepcopy(program.program.graph)
    node_of = {node.name: node for node in graph.find_nodes(op="placeholder")}
    bound = {binding: node_of[placeholder] for placeholder, binding in program.inputs.items()}
    layers = range(program.cache.num_layers)
    found = [_find_layer(layer, bound, proven) for layer in layers]
    writes = {write.name for layer in found for write in (layer.k_write, layer.v_write)}
    if returned := writes.intersection(program.program.graph_signature.user_outputs):
        raise WriteNotProven(f"the step returns the cache {', '.join(sorted(returned))} writes; a pool cannot be returned")

    block_table, pools = _add_inputs(graph, program.cache, bound)
    for layer, pool in zip(found, pools, strict=True):
        _rewrite(graph, layer, pool, block_table, bound[WRITE_START], program.cache.layout)
    (output,) = graph.find_nodes(op="output")
    num_mutations = sum(spec.kind is not OutputKind.USER_OUTPUT for spec in program.program.graph_signature.output_specs)
    # The mutations come first, and all of them are cache writes: any other would have been an input the program does not name.
    output.args = (output.args[0][num_mutations:],)
    graph.eliminate_dead_code()
    caches = [bound.pop(cache_name(layer, kind)) for layer in layers for kind in "kv"]
    for cache in caches:
        graph.erase_node(cache)

    bound |= {BLOCK_TABLE: block_table} | {pool_name(layer): pool for layer, pool in enumerate(pools)}
    signature = _signature(program.program, caches=caches, added=[block_table, *pools])
    lowered = rebuild_in_place(program.program, graph, signature, tuple(map(sample_of, bound.values())))
    return replace(program, program=lowered, inputs={node.name: binding for binding, node in bound.items()})


def _find_layer(layer: int, bound: dict[str, fx.Node], proven: Collection[str]) -> _CachedAttention:
    """The writes and the attention of `layer`; WriteNotProven, naming the node in the way, unless they are all there is."""
    k_write, v_write = (_only_write(cache_name(layer, kind), bound[cache_name(layer, kind)], proven) for kind in "kv")
    readers = [user for write in (k_write, v_write) for user in write.users if user.op != "output"]
    attend = readers[0] if readers else None
    if attend is None or attend.target is not torch.ops.quire.attend.default or attend.args[1:3] != (k_write, v_write):
        raise WriteNotProven(f"layer {layer}: quire::attend must read {k_write} and {v_write}; {attend} does")
    if others := [user for user in readers if user is not attend]:
        raise WriteNotProven(f"layer {layer}: only {attend} may read the written caches; {_names(others)} does too")
    if attend.args[3] is not bound[WRITE_START]:
        raise WriteNotProven(f"layer {layer}: {attend} must mask by the input {WRITE_START}; it masks by {attend.args[3]}")
    return _CachedAttention(k_write, v_write, attend)


def _only_write(name: str, cache: fx.Node, proven: Collection[str]) -> fx.Node:
    writes = [user for user in cache.users if user.target is torch.ops.aten.index_put.default and user.args[0] is cache]
    if len(writes) != 1 or len(cache.users) != 1:
        raise WriteNotProven(f"{name} must be read by one index_put and nothing else; its readers are {_names(cache.users)}")
    (write,) = writes
    if write.name not in proven:
        raise WriteNotProven(f"{name}: no proof that {write} writes one contiguous run a row from {WRITE_START} on")
    return write


def _names(nodes: Collection[fx.Node]) -> str:
    return ", ".join(node.name for node in nodes) or "none"


def _add_inputs(graph: fx.Graph, cache: KVCacheSpec, bound: dict[str, fx.Node]) -> tuple[fx.Node, list[fx.Node]]:
    """Placeholders of the block table and of every pool, behind the last input there is."""
    mode = bound[INPUT_IDS].meta["val"].fake_mode
    assert isinstance(mode, FakeTensorMode)
    batch, device = bound[INPUT_IDS].meta["val"].shape[0], bound[INPUT_IDS].meta["val"].device
    width: int | SymInt = 1
    if cache.layout is Layout.PAGED:
        widest = max(2, cache.max_pages)
        width = new_size(mode, "max_pages", sample=min(3, widest), minimum=1, maximum=widest)
    pages = new_size(mode, "num_pages", sample=_SAMPLE_PAGES, minimum=2, maximum=_MAX_POOL_PAGES)
    last = graph.find_nodes(op="placeholder")[-1]
    with mode:
        values = [torch.empty((batch, width), dtype=torch.int32, device=device)]
        for _, group in cache.iter_layers():
            shape: list[int | SymInt] = list(cache.pool_shape(group, _SAMPLE_PAGES))
            shape[cache.layout.page_dim] = pages
            values.append(torch.empty(shape, dtype=getattr(torch, group.dtype.value), device=device))
    nodes = []
    for name, value in zip([BLOCK_TABLE, *(f"kv_pool_{layer}" for layer in range(cache.num_layers))], values, strict=True):
        with graph.inserting_after(last):
            last = graph.placeholder(name)
        last.meta["val"] = value
        nodes.append(last)
    return nodes[0], nodes[1:]


def _rewrite(graph: fx.Graph, layer: _CachedAttention, pool: fx.Node, block_table: fx.Node, start: fx.Node, layout: Layout) -> None:
    attend = layer.attend
    with graph.inserting_before(attend):
        # index_put took the rows as [batch, query_len, kv_heads, head_dim].
        k, v = (_transposed(graph, write.args[2]) for write in (layer.k_write, layer.v_write))
        q, (scale, window, softcap, sinks) = attend.args[0], attend.args[4:]
        arguments = (q, k, v, pool, block_table, start, layout.page_dim, scale, window, softcap, sinks)
        paged = graph.call_function(torch.ops.quire.paged_attend.default, arguments)
    paged.meta = dict(attend.meta)
    attend.replace_all_uses_with(paged)
    graph.erase_node(attend)


def _transposed(graph: fx.Graph, rows: object) -> fx.Node:
    assert isinstance(rows, fx.Node)
    node = graph.call_function(torch.ops.aten.permute.default, (rows, [0, 2, 1, 3]))
    node.meta["val"] = rows.meta["val"].permute(0, 2, 1, 3)
    return node


def _signature(source: ExportedProgram, caches: list[fx.Node], added: list[fx.Node]) -> ExportGraphSignature:
    gone = {cache.name for cache in caches}
    inputs = [spec for spec in source.graph_signature.input_specs if spec.arg.name not in gone]
    inputs += [InputSpec(InputKind.USER_INPUT, TensorArgument(node.name), None) for node in added]
    return ExportGraphSignature(inputs, [s for s in source.graph_signature.output_specs if s.kind is OutputKind.USER_OUTPUT])

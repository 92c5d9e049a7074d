"""Rewrite proven writes and the attention over them, of a program somebody else exported, as our own export has them.

    k1 = index_copy(k_cache, 2, start + 0..n, k)          a run from write_start on, in whatever form
    o  = scaled_dot_product_attention(q, k1, v1, mask)    sees cells j <= start + i, and of those the newest `window`
    =>
    k1 = index_put(k_cache, [rows, None, slots], k^T)
    o  = quire::attend(q, k1, v1, write_start, scale, window, None, None)

so that page_caches.py can take them. What is proven of a layer, and which window its mask is, comes from the proof. Left alone:
everything else, and a program whose attention is quire::attend already. Refused (UnsupportedModel): a write that is not made on
the cache itself, or whose rows lack an axis.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from compiler_service.export.program import DecoderProgram
from compiler_service.lowering.rewrite import rebuild
from shared.bindings import INPUT_IDS, WRITE_START, cache_name
from shared.errors import UnsupportedModel
from shared.kv_spec import KVCacheSpec, LayerGroup

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class RowsWritten:
    """`node` writes a cache from `write_start` on; axis `axes[a]` of the rows `update` runs along the cache's axis `a`."""

    node: str
    update: str
    axes: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class ProvenLayer:
    """What the proof knows of one layer. `attention` sees the cells up to each query's own, the newest `window` of them."""

    k: RowsWritten
    v: RowsWritten
    attention: str
    window: int | None


def attend_by_start(program: DecoderProgram, layers: Sequence[ProvenLayer]) -> DecoderProgram:
    """The same step, whose cache spec states the windows. `layers` are in the order of the program's."""
    graph = copy.deepcopy(program.program.graph)
    nodes = {node.name: node for node in graph.nodes}
    bound = {binding: nodes[placeholder] for placeholder, binding in program.inputs.items()}
    new_content = {str(spec.target): spec.arg.name for spec in program.program.graph_signature.output_specs}
    rewrite = _Rewrite(graph, bound[INPUT_IDS], bound[WRITE_START], new_content)
    for number, layer in enumerate(layers):
        for kind, written in (("k", layer.k), ("v", layer.v)):
            rewrite.put_rows(nodes[written.node], bound[cache_name(number, kind)], nodes[written.update], written.axes)
        rewrite.attend(nodes[layer.attention], nodes[layer.k.node], nodes[layer.v.node], layer.window)
    graph.eliminate_dead_code()
    rebuilt = rebuild(program.program, graph, program.program.graph_signature)
    return replace(program, program=rebuilt, cache=_with_windows(program.cache, [layer.window for layer in layers]))


class _Rewrite:
    """One graph on its way. `starts` is int32 `[B]`; the rows and cells written are the same for every layer. `new_content` names
    the node that is handed back for a cache."""

    def __init__(self, graph: fx.Graph, tokens: fx.Node, starts: fx.Node, new_content: Mapping[str, str]) -> None:
        self._graph, self._tokens, self._starts, self._new_content = graph, tokens, starts, new_content
        device = tokens.meta["val"].device
        first = next(node for node in graph.nodes if node.op != "placeholder")
        with graph.inserting_before(first):
            count = self._call(aten.arange.default, self._size(1), dtype=torch.int32, device=device, pin_memory=False)
            self._cells = self._call(aten.add.Tensor, self._call(aten.unsqueeze.default, starts, 1), count)
            rows = self._call(aten.arange.default, self._size(0), device=device, pin_memory=False)
            self._rows = self._call(aten.unsqueeze.default, rows, 1)

    def put_rows(self, write: fx.Node, cache: fx.Node, update: fx.Node, axes: tuple[int | None, ...]) -> None:
        """Make `write` an index_put of `update` straight on `cache`. It keeps its name, by which its proof is known."""
        if write.args[0] is not cache or self._new_content.get(cache.name) != write.name:
            raise UnsupportedModel(f"{write} does not write {cache} itself: write the whole cache, not a view of it")
        if None in axes:
            raise UnsupportedModel(
                f"the rows {update} that {write} writes lack an axis of {cache}: write [batch, heads, 1, head_dim]"
            )
        batch, heads, cells, head_dim = axes
        with self._graph.inserting_before(write):
            rows = self._call(aten.permute.default, update, [batch, cells, heads, head_dim])
        write.target, write.args, write.kwargs = aten.index_put.default, (cache, [self._rows, None, self._cells], rows), {}

    def attend(self, attention: fx.Node, k: fx.Node, v: fx.Node, window: int | None) -> None:
        q = attention.args[0]
        assert isinstance(q, fx.Node)
        scale = attention.kwargs.get("scale")
        if scale is None:
            scale = q.meta["val"].shape[3] ** -0.5
        with self._graph.inserting_before(attention):
            ours = self._graph.call_function(torch.ops.quire.attend.default, (q, k, v, self._starts, scale, window, None, None))
        ours.meta = dict(attention.meta)
        attention.replace_all_uses_with(ours)
        self._graph.erase_node(attention)

    def _size(self, axis: int) -> fx.Node | int:
        size = self._tokens.meta["val"].shape[axis]
        return size if isinstance(size, int) else self._call(aten.sym_size.int, self._tokens, axis)

    def _call(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = self._graph.call_function(op, args, kwargs)
        with self._tokens.meta["val"].fake_mode:
            node.meta["val"] = op(*fx.map_arg(args, lambda n: n.meta["val"]), **kwargs)
        return node


def _with_windows(cache: KVCacheSpec, windows: Sequence[int | None]) -> KVCacheSpec:
    """A window of at least `max_len` is none: whatever a row can hold lies inside it."""
    groups: dict[LayerGroup, list[int]] = {}
    for (layer, group), window in zip(cache.iter_layers(), windows, strict=True):
        seen = window if window is not None and window < cache.max_len else None
        groups.setdefault(replace(group, layers=(0,), window=seen), []).append(layer)
    return replace(cache, groups=tuple(replace(group, layers=tuple(layers)) for group, layers in groups.items()))

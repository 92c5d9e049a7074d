"""A program somebody else exported, rewritten to this compiler's inputs and outputs: the linear program of `export/program.py`.

    input_ids int64 [B, n]                         =>   input_ids int32, cast
    start: 0-d, [1] or [B]; cache_position [n]     =>   write_start int32 [B]; write_start[0] + 0..n
    position_ids [B, n], if it has them            =>   position_ids int32, cast
    K and V buffers, written                       =>   inputs k_cache.i, v_cache.i, written
    state written before it is read                =>   gone: the value written is used in its place
    logits [B, n, V]                               =>   logits float32 [B, V] of the token `last_index` names

What the program computes is left alone; its writes and masks are for the proof to judge. Refused (UnsupportedModel): inputs of
other shapes, state that is read before it is written, a batch fixed to anything but 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import SymInt, Tensor, fx
from torch._export.verifier import Verifier
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, OutputKind, OutputSpec, TensorArgument

from compiler_service.export.program import AxisRange, DecoderProgram
from compiler_service.ingest.program_caches import LayerCaches
from compiler_service.lowering.rewrite import rebuild_with_inputs, sample_of
from shared.bindings import INPUT_IDS, LAST_INDEX, LOGITS, POSITION_IDS, WRITE_START, cache_name
from shared.errors import FieldOutOfRange, UnsupportedModel
from shared.kernels.attention.ops import load_ops
from shared.kv_spec import KVCacheSpec
from shared.profiles import OptimizationProfile, ProfileSet

aten = torch.ops.aten
_NO_BOUND = (1 << 63) - 1
"""Of a size that the export left open at its end."""
_STATIC_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def adopt_program(
    source: ExportedProgram, layers: Sequence[LayerCaches], cache: KVCacheSpec, profiles: ProfileSet
) -> DecoderProgram:
    """The functional program `source`, whose caches are `layers`, over the caches of `cache`.

    FieldOutOfRange when a profile asks for sizes the program was not exported for.
    """
    load_ops()
    adoption = _Adoption(source, layers)
    program = adoption.run()
    tokens = adoption.inputs[INPUT_IDS].meta["val"]
    batch, query_len = (_range(source, size) for size in tokens.shape)
    for profile in profiles.profiles:
        _check_profile(profile, batch, query_len)
    stored = {**source.state_dict, **source.constants}
    read = {spec.target: spec.kind for spec in program.graph_signature.input_specs if spec.target is not None}
    return DecoderProgram(
        program=program,
        cache=cache,
        profiles=profiles,
        batch=batch,
        query_len=query_len,
        vocab_size=adoption.vocab_size,
        inputs={node.name: binding for binding, node in adoption.inputs.items()},
        weights={target: target for target, kind in read.items() if kind is InputKind.PARAMETER},
        constants={target: stored[target] for target, kind in read.items() if kind is InputKind.BUFFER},
    )


@dataclass(slots=True)
class _Adoption:
    """One program on its way. `inputs` are the new placeholders by binding; `new` maps the source's nodes to the copy's."""

    source: ExportedProgram
    layers: Sequence[LayerCaches]
    graph: fx.Graph = field(default_factory=fx.Graph)
    inputs: dict[str, fx.Node] = field(default_factory=dict)
    new: dict[fx.Node, fx.Node] = field(default_factory=dict)
    vocab_size: int = 0

    def run(self) -> ExportedProgram:
        signature = self.source.graph_signature
        placeholders = {node.name: node for node in self.source.graph.find_nodes(op="placeholder")}
        cache_of = {layer.k: cache_name(i, "k") for i, layer in enumerate(self.layers)}
        cache_of |= {layer.v: cache_name(i, "v") for i, layer in enumerate(self.layers)}
        kept = [s for s in signature.input_specs if s.kind in _STATIC_KINDS and s.target not in cache_of]
        for spec in kept:
            self.new[placeholders[spec.arg.name]] = self.graph.node_copy(placeholders[spec.arg.name])
        given = [placeholders[name] for name in signature.user_inputs if isinstance(name, str)]
        self._declare_inputs(given)
        by_target = {target: placeholders[name] for name, target in signature.inputs_to_buffers.items()}
        for target, binding in cache_of.items():
            value = by_target[target].meta["val"]
            self.inputs[binding] = self.new[by_target[target]] = self._placeholder(binding.replace(".", "_"), value)
        self._feed_inputs(given)
        self._copy_nodes(self._dead_state(by_target, cache_of))
        return self._rebuilt(kept, by_target, cache_of)

    def _declare_inputs(self, given: Sequence[fx.Node]) -> None:
        tokens = [node for node in given if _rank(node) == 2 and node.name != POSITION_IDS]
        if len(tokens) != 1:
            raise UnsupportedModel(
                f"a program takes its tokens as one integer input [batch, length]; this one has {_shapes(given)}"
            )
        rows, length = tokens[0].meta["val"].shape
        if isinstance(rows, int) and rows != 1:
            raise UnsupportedModel(f"the batch of {tokens[0]} must be 1 or dynamic; it is {rows}")
        shapes = {INPUT_IDS: (rows, length), POSITION_IDS: (rows, length), WRITE_START: (rows,), LAST_INDEX: (rows,)}
        if not any(node.name == POSITION_IDS for node in given):
            del shapes[POSITION_IDS]
        for binding, shape in shapes.items():
            with self._mode:
                value = torch.empty(shape, dtype=torch.int32)
            self.inputs[binding] = self._placeholder(binding, value)

    @property
    def _mode(self) -> FakeTensorMode:
        placeholders = self.source.graph.find_nodes(op="placeholder")
        mode = next(v.fake_mode for n in placeholders if isinstance(v := n.meta["val"], torch._subclasses.FakeTensor))
        assert isinstance(mode, FakeTensorMode)
        return mode

    def _placeholder(self, name: str, value: Tensor) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = value
        return node

    def _feed_inputs(self, given: Sequence[fx.Node]) -> None:
        """Give every input of the source the value it had, out of the new inputs."""
        tokens, starts = self.inputs[INPUT_IDS], self.inputs[WRITE_START]
        for node in given:
            if _rank(node) == 2:
                self.new[node] = self._cast(self.inputs[node.name] if node.name == POSITION_IDS else tokens, node)
                continue
            rows, length = tokens.meta["val"].shape
            start = self._cast(starts, node)
            shape = tuple(node.meta["val"].shape)
            if shape == (rows,):
                self.new[node] = start
                continue
            first = self._call(aten.select.int, start, 0, 0)
            if shape == ():
                self.new[node] = first
            elif shape == (length,) and rows == 1:
                size = self._call(aten.sym_size.int, tokens, 1)
                cells = self._call(
                    aten.arange.default, size, dtype=node.meta["val"].dtype, device=torch.device("cpu"), pin_memory=False
                )
                self.new[node] = self._call(aten.add.Tensor, cells, first)
            else:
                raise UnsupportedModel(f"{node} of shape {list(shape)} is neither tokens, positions nor the start of the write")

    def _cast(self, node: fx.Node, wanted: fx.Node) -> fx.Node:
        dtype = wanted.meta["val"].dtype
        if dtype.is_floating_point or dtype is torch.bool:
            raise UnsupportedModel(f"{wanted} is {dtype}; a program's inputs are integers")
        return node if dtype is torch.int32 else self._call(aten._to_copy.default, node, dtype=dtype)

    def _call(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(op, args, kwargs)
        with self._mode:
            node.meta["val"] = op(*fx.map_arg(args, lambda n: n.meta["val"]), **kwargs)
        return node

    def _dead_state(self, by_target: dict[str, fx.Node], cache_of: dict[str, str]) -> dict[fx.Node, fx.Node]:
        """Nodes that overwrite a buffer that is no cache -> the value written; UnsupportedModel for state that is read first."""
        values = {}
        for spec in self.source.graph_signature.output_specs:
            if spec.kind is not OutputKind.BUFFER_MUTATION or spec.target in cache_of:
                continue
            assert spec.target is not None
            old = by_target[spec.target]
            for user in old.users:
                if user.target is not aten.copy.default or user.args[0] is not old:
                    raise UnsupportedModel(f"{spec.target} is state besides the K and V caches: {user} reads it from step to step")
                written = user.args[1]
                assert isinstance(written, fx.Node)
                values[user] = written
        return values

    def _copy_nodes(self, overwrites: dict[fx.Node, fx.Node]) -> None:
        for node in self.source.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            if node in overwrites:
                value, wanted = self.new[overwrites[node]], node.meta["val"]
                if tuple(value.meta["val"].shape) != tuple(wanted.shape):
                    value = self._call(aten.expand.default, value, list(wanted.shape))
                self.new[node] = (
                    value
                    if value.meta["val"].dtype is wanted.dtype
                    else self._call(aten._to_copy.default, value, dtype=wanted.dtype)
                )
                continue
            self.new[node] = self.graph.node_copy(node, lambda n: self.new[n])

    def _rebuilt(self, kept: list[InputSpec], by_target: dict[str, fx.Node], cache_of: dict[str, str]) -> ExportedProgram:
        signature = self.source.graph_signature
        nodes = {node.name: node for node in self.source.graph.nodes}
        outputs = [
            OutputSpec(
                OutputKind.USER_INPUT_MUTATION,
                TensorArgument(self.new[nodes[spec.arg.name]].name),
                self.inputs[cache_of[spec.target]].name,
            )
            for spec in signature.output_specs
            if spec.kind is OutputKind.BUFFER_MUTATION and spec.target in cache_of
        ]
        written = [self.new[nodes[spec.arg.name]] for spec in signature.output_specs if spec.target in cache_of]
        logits = self._last_logits([self.new[nodes[name]] for name in signature.user_outputs if isinstance(name, str)])
        self.graph.output((*written, logits))
        specs = [InputSpec(s.kind, TensorArgument(self.new[nodes[s.arg.name]].name), s.target, s.persistent) for s in kept]
        specs += [InputSpec(InputKind.USER_INPUT, TensorArgument(node.name), None) for node in self.inputs.values()]
        outputs.append(OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(logits.name), None))
        samples = tuple(sample_of(node) for node in self.inputs.values())
        return rebuild_with_inputs(self.source, self.graph, ExportGraphSignature(specs, outputs), samples, Verifier)

    def _last_logits(self, outputs: Sequence[fx.Node]) -> fx.Node:
        """Of the first output, the row `last_index` asks for."""
        logits, tokens = outputs[0], self.inputs[INPUT_IDS]
        value, (rows, length) = logits.meta["val"], tokens.meta["val"].shape
        # Logits of the last token alone are none of a row that is padded at its end.
        if value.dim() != 3 or value.shape[1] != length or not value.dtype.is_floating_point:
            raise UnsupportedModel(f"the first output must be {LOGITS} [batch, length, vocabulary]; it is {list(value.shape)}")
        self.vocab_size = int(value.shape[-1])
        count = rows if isinstance(rows, int) else self._call(aten.sym_size.int, tokens, 0)
        each = self._call(aten.arange.default, count, device=torch.device("cpu"), pin_memory=False)
        logits = self._call(aten.index.Tensor, logits, [each, self.inputs[LAST_INDEX]])
        return logits if value.dtype is torch.float32 else self._call(aten._to_copy.default, logits, dtype=torch.float32)


def _rank(node: fx.Node) -> int:
    return int(node.meta["val"].dim())


def _shapes(nodes: Sequence[fx.Node]) -> str:
    return ", ".join(f"{node} {list(node.meta['val'].shape)}" for node in nodes)


def _range(program: ExportedProgram, size: int | SymInt) -> AxisRange:
    if isinstance(size, int):
        return AxisRange(size, size)
    bounds = program.range_constraints[size.node.expr]
    return AxisRange(int(bounds.lower), int(bounds.upper) if bounds.upper.is_Integer else _NO_BOUND)


def _check_profile(profile: OptimizationProfile, batch: AxisRange, query_len: AxisRange) -> None:
    for what, asked, exported in (("batch", profile.batch, batch), ("query length", profile.query_len, query_len)):
        if asked.min < exported.min or asked.max > exported.max:
            most = "any" if exported.max == _NO_BOUND else exported.max
            raise FieldOutOfRange(
                f"profile {profile} asks for a {what} of {asked.min} to {asked.max}; the program was exported for "
                f"{exported.min} to {most}: choose profiles inside, or export it again",
                field="profiles",
            )

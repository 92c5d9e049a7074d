"""A proven decoder step as one TensorRT network.

Torch-TensorRT's registry converts the ordinary ops, node by node; nothing is partitioned, so a network exists only if every node
has a converter. The writes and the attention are ours: a proven write becomes a KVCacheUpdate layer from the row's start, whose
output the engine aliases to the cache; `quire::attend` becomes attention over it (attention.py). Weights are inputs of the
network, so that a build needs none and engines share one copy of them, or constants of it where the caller asks for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import tensorrt as trt
import torch
from torch import Tensor, fx
from torch.export.graph_signature import InputKind, InputSpec, OutputKind
from torch_tensorrt.dynamo._settings import CompilationSettings
from torch_tensorrt.dynamo.conversion._ConversionContext import ConversionContext
from torch_tensorrt.dynamo.conversion._ConverterRegistry import DYNAMO_CONVERTERS, CallingConvention
from torch_tensorrt.dynamo.conversion.converter_utils import get_node_name

from compiler_service.backends.tensorrt.attention import Masks, attend, masked_attention
from compiler_service.backends.tensorrt.converters import OWN, with_its_end
from compiler_service.backends.tensorrt.copies import COPIED_WRITES, copy_and_write
from compiler_service.backends.tensorrt.layers import DTYPES, ITensor, Layers
from compiler_service.backends.tensorrt.pages import gather_pages, write_packed
from compiler_service.export.program import DecoderProgram
from compiler_service.proof.algebra import ONE
from compiler_service.proof.certificate import ProofReport, WriteProof
from shared.bindings import (
    BLOCK_TABLE,
    INPUT_IDS,
    LOGITS,
    PACKED_ENDS,
    PACKED_OFFSETS,
    PACKED_ORDER,
    WRITE_START,
    AliasedBinding,
    BindingSpec,
    Role,
    updated_name,
)
from shared.errors import UnsupportedModel, WriteNotProven

Shape = tuple[int | None, ...]


@dataclass(slots=True)
class Network:
    """A network and what its names mean. `bindings`: inputs in the order of the program, then outputs. `copied` are the caches
    whose new content is an output of its own. `kept` holds what the definition points at."""

    definition: Any
    bindings: list[BindingSpec] = field(default_factory=list)
    aliases: list[AliasedBinding] = field(default_factory=list)
    copied: list[str] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)


def build_network(
    definition: Any,
    program: DecoderProgram,
    report: ProofReport,
    constants: Mapping[str, Tensor] | None = None,
    *,
    allow_copying: bool = False,
) -> Network:
    """Fill `definition` (a fresh trt.INetworkDefinition) with `program`, whose writes `report` proves. With `constants`, the
    model's tensors by checkpoint name, weights are constants of it instead of inputs.

    WriteNotProven, naming the node, for a write without a proof, unless `allow_copying` takes it on a copy; UnsupportedModel for
    an op that no converter takes.
    """
    network = Network(definition)
    _Converter(program, report, network, constants, allow_copying=allow_copying).run()
    return network


class _Converter(fx.Interpreter):
    """Runs the program's graph on the network's tensors."""

    def __init__(
        self,
        program: DecoderProgram,
        report: ProofReport,
        network: Network,
        constants: Mapping[str, Tensor] | None,
        *,
        allow_copying: bool,
    ) -> None:
        exported = program.program
        super().__init__(fx.GraphModule(torch.nn.Module(), exported.graph), garbage_collect_values=False)
        self._program, self._network, self._constants = program, network, constants
        self._copied = {proof.cache for proof in report.caches if not proof.ok} if allow_copying else set()
        self._specs: Mapping[str, InputSpec] = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}
        self._writes: dict[str, WriteProof] = {proof.after.node: proof.after for proof in report.caches if proof.ok}
        settings = CompilationSettings(min_block_size=1, immutable_weights=True)
        DYNAMO_CONVERTERS.set_compilation_settings(settings)
        self._context = ConversionContext(network.definition, settings)
        network.kept.append(self._context)  # it holds the values of constants, which the builder reads when it builds
        self._inputs: dict[str, ITensor] = {}
        self._nodes = {node.name: node for node in exported.graph.nodes}
        self._masks: Masks | None = None

    def run_node(self, n: fx.Node) -> Any:
        self._node = n
        self._context.current_node = n
        return super().run_node(n)

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        """An input of the network, or the value of a constant."""
        spec, value = self._specs[self._node.name], self._node.meta["val"]
        if spec.kind is InputKind.USER_INPUT:
            name = self._program.inputs[self._node.name]
            if name.startswith("kv_pool."):
                _, _, heads, page_size, head_dim = value.shape
                return self._input(name, Role.CACHE, value.dtype, (None, heads, page_size, head_dim))
            if name == BLOCK_TABLE:
                return self._input(name, Role.INPUT, value.dtype, (None, self._program.cache.max_pages))
            return self._input(name, Role.CACHE if "_cache." in name else Role.INPUT, value.dtype, _shape(value))
        assert spec.target is not None
        if spec.kind is InputKind.PARAMETER:
            return self._weight(self._program.weights[spec.target], value)
        constants = self._program.constants if spec.kind is InputKind.BUFFER else self._program.program.constants
        return constants[spec.target]

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.quire.attend.default:
            return self._attend(*args)
        if target is torch.ops.quire.paged_attend.default:
            return self._paged_attend(*args)
        if self._node.name in self._writes:
            return self._write(self._writes[self._node.name])
        if self._copied and str(target) in COPIED_WRITES:
            return copy_and_write(self._layers(), self._node, args)
        if (written := self._cache_of(self._node)) and written not in self._copied:
            raise WriteNotProven(f"{self._node} writes {written} without a proof that its cells are one run a row")
        own = OWN.get(target)
        if own is not None and (found := own(self._layers(), self._node, args, kwargs)) is not NotImplemented:
            return found
        if target is torch.ops.aten.slice_scatter.default:
            args = with_its_end(self._node, args)
        packet = DYNAMO_CONVERTERS.get(self._node)
        if target is torch.ops.aten.scaled_dot_product_attention.default and (packet is None or self._queries_are_shared()):
            return self._masked_attention(*args, **kwargs)
        if packet is None:
            raise UnsupportedModel(f"TensorRT has no converter for {self._node} ({target}); an engine with gaps is not built")
        converter, convention, _ = packet
        where = self._network.definition if convention is CallingConvention.LEGACY else self._context
        return converter(where, target, args, kwargs, get_node_name(self._node))

    def output(self, target: Any, args: Any, kwargs: Any) -> None:
        """Mark the written caches and the logits."""
        for spec, tensor in zip(self._program.program.graph_signature.output_specs, args[0], strict=True):
            if spec.kind is OutputKind.USER_INPUT_MUTATION:
                assert spec.target is not None
                cache = self._program.inputs[spec.target]
                if cache in self._copied:
                    self._output(updated_name(cache), Role.OUTPUT, self._whole(cache, tensor))
                    self._network.copied.append(cache)
                else:
                    self._updated(cache, tensor)
            else:
                self._output(LOGITS, Role.OUTPUT, tensor)

    def _weight(self, name: str, value: Tensor) -> ITensor:
        if self._constants is None:
            return self._input(name, Role.WEIGHT, value.dtype, _shape(value))
        if name not in self._inputs:
            self._inputs[name] = Layers(self._network.definition, self._network.kept, name).weight(self._constants[name])
        return self._inputs[name]

    def _input(self, name: str, role: Role, dtype: torch.dtype, shape: Shape) -> ITensor:
        """Tied weights are one input."""
        if name not in self._inputs:
            dims = tuple(-1 if size is None else size for size in shape)
            self._inputs[name] = self._network.definition.add_input(name, DTYPES[dtype], dims)
            self._network.bindings.append(BindingSpec(name, role, str(dtype).removeprefix("torch."), shape))
        return self._inputs[name]

    def _whole(self, cache: str, tensor: ITensor) -> ITensor:
        """The new content of `cache`, in its own shape."""
        heads, cells, head_dim = self._inputs[cache].shape[1:]
        return Layers(self._network.definition, self._network.kept, cache).reshape(tensor, (0, heads, cells, head_dim))

    def _updated(self, cache: str, tensor: ITensor) -> None:
        self._output(updated_name(cache), Role.CACHE, tensor)
        self._network.aliases.append(AliasedBinding(input=cache, output=updated_name(cache)))

    def _output(self, name: str, role: Role, tensor: ITensor) -> None:
        tensor.name = name
        self._network.definition.mark_output(tensor)
        dtype = next(str(known) for known, dtype in DTYPES.items() if dtype == tensor.dtype).removeprefix("torch.")
        shape = tuple(None if size < 0 else size for size in tensor.shape)
        self._network.bindings.append(BindingSpec(name, role, dtype, shape))

    def _write(self, proof: WriteProof) -> ITensor:
        """Rows from `write_start` on. Sizes the graph knows and the network lost on the way are stated again."""
        cache, update = self._inputs[proof.cache], self._rows_of(proof)
        layers = self._layers()
        start = self._inputs[WRITE_START]
        layer = self._network.definition.add_kv_cache_update(cache, update, start, trt.KVCacheMode.LINEAR)
        return layers.output(layer, "kv_cache_update")

    def _rows_of(self, proof: WriteProof) -> ITensor:
        """The update as `[B, Hkv, n, D]`."""
        assert proof.run is not None
        proof.require_start(self._program.placeholder(WRITE_START))
        cache = self._inputs[proof.cache]
        # A write of one cell may come without the axis of the cells, which size 1 puts back.
        axes = [axis for axis in proof.update_axes if axis is not None]
        if len(axes) < len(cache.shape) and proof.run.length != ONE:
            raise WriteNotProven(f"{proof.node} writes {proof.cache} with rows that are broadcast; the engine needs them whole")
        update = self.env[self._nodes[proof.update]]
        return self._layers().reshape(update, (0, cache.shape[1], -1, cache.shape[3]), permute=axes)

    def _attend(self, q: Any, k: Any, v: Any, start: Any, scale: float, *rest: Any) -> ITensor:
        node = self._node
        if start is not self._inputs[WRITE_START]:
            raise WriteNotProven(f"{node} masks by {node.args[3]}; the engine's starts are {WRITE_START}")
        query, keys = node.all_input_nodes[:2]
        heads = (query.meta["val"].shape[1], keys.meta["val"].shape[1])
        return attend(self._layers(), self._masks_over(self._program.cache.max_len), q, k, v, heads, scale, *rest)

    def _paged_attend(
        self, q: Any, k: Any, v: Any, pool: Any, table: Any, start: Any, page_dim: int, scale: float, *rest: Any
    ) -> ITensor:
        """page_caches.py took the proven writes into this op. They go into the pool as packed rows; attention reads it back by
        the block table, all pages a row can have."""
        layers, cache = self._layers(), self._program.cache
        assert start is self._inputs[WRITE_START]
        packed = [self._input(name, Role.INPUT, torch.int32, (None,)) for name in (PACKED_ORDER, PACKED_ENDS, PACKED_OFFSETS)]
        written = write_packed(layers, pool, k, v, *packed)
        self._updated(next(name for name, tensor in self._inputs.items() if tensor is pool), written)
        keys, values = gather_pages(layers, written, table, cache.max_pages)
        heads = (self._node.all_input_nodes[0].meta["val"].shape[1], pool.shape[1])
        return attend(layers, self._masks_over(cache.max_pages * cache.page_size), q, keys, values, heads, scale, *rest)

    def _masked_attention(self, q: Any, k: Any, v: Any, mask: Any = None, dropout: float = 0.0, *_: Any, **options: Any) -> ITensor:
        """A program's own attention where TensorRT has no layer for it: one K/V head for all, keys and values of two sizes, queries
        of two attentions."""
        shapes = [node.meta["val"].shape for node in self._node.all_input_nodes[:3]]
        if mask is None or dropout:
            raise UnsupportedModel(f"{self._node} attends without a mask or drops weights; TensorRT has no layer for its shapes")
        scale = options.get("scale") or shapes[0][3] ** -0.5
        return masked_attention(self._layers(), q, k, v, mask, (shapes[0][1], shapes[1][1]), scale, shapes[2][3])

    def _queries_are_shared(self) -> bool:
        """Two attention layers over one query (DiffLlama's) end TensorRT's builder with a segmentation fault."""
        (query, *_), attention = self._node.all_input_nodes, self._node.target
        return sum(user.target is attention for user in query.users) > 1

    def _masks_over(self, num_cells: int) -> Masks:
        if self._masks is None:
            layers = Layers(self._network.definition, self._network.kept, "mask")
            self._masks = Masks(layers, self._inputs[INPUT_IDS], self._inputs[WRITE_START], num_cells)
        return self._masks

    def _layers(self) -> Layers:
        return Layers(self._network.definition, self._network.kept, self._node.name)

    def _cache_of(self, node: fx.Node) -> str | None:
        """The cache a node would write, were it a write."""
        first = node.args[0] if node.args else None
        if isinstance(first, fx.Node) and "_cache." in self._program.inputs.get(first.name, ""):
            return None if node.target is torch.ops.aten.sym_size.int else self._program.inputs[first.name]
        return None


def _shape(value: Tensor) -> Shape:
    return tuple(size if isinstance(size, int) else None for size in value.shape)

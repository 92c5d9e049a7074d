"""Which buffers of a functional program are the K and V caches of its layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind

from shared.errors import UnsupportedModel

_KEYS = re.compile(r"(?<![a-z])(key|keys|k)(?![a-z])")
_VALUES = {"key": "value", "keys": "values", "k": "v"}
_RANK = 4


@dataclass(frozen=True, slots=True)
class LayerCaches:
    """Names of one layer's buffers, `[batch, kv_heads, max_len, head_dim]` each."""

    k: str
    v: str


def find_caches(program: ExportedProgram) -> tuple[LayerCaches, ...]:
    """The layers' caches in the order the program names them: written buffers of rank 4 whose names differ in key and value.

    UnsupportedModel names a written buffer of rank 4 that has no partner or shares its memory, or says that there is none at all.
    """
    signature = program.graph_signature
    values = {node.name: node.meta["val"] for node in program.graph.find_nodes(op="placeholder")}
    buffers = {target: values[name] for name, target in signature.inputs_to_buffers.items()}
    changed = {spec.target for spec in signature.output_specs if spec.kind is OutputKind.BUFFER_MUTATION}
    written = [name for name in signature.inputs_to_buffers.values() if name in changed and _is_cache(buffers[name])]
    layers = []
    for name in written:
        if partner := next((other for other in _partners(name) if other in written), None):
            layers.append(LayerCaches(name, partner))
    paired = {name for layer in layers for name in (layer.k, layer.v)}
    if lost := [name for name in written if name not in paired]:
        raise UnsupportedModel(f"{lost[0]} is written and is neither the keys nor the values of a layer by its name")
    if not layers:
        raise UnsupportedModel("the program writes no buffer [batch, heads, cells, head_dim]: it has no static K and V caches")
    for cache, other in shared_memory(program, paired).items():
        raise UnsupportedModel(f"{cache} and {other} are views of one memory; a pool holds every cache in its own")
    return tuple(layers)


def shared_memory(program: ExportedProgram, targets: Iterable[str]) -> dict[str, str]:
    """For each of the buffers `targets` that is the same memory as another buffer or constant, the name of that other one."""
    by_memory: dict[int, list[str]] = {}
    for spec in program.graph_signature.input_specs:
        tensor = stored_tensor(program, spec)
        if tensor is not None and not isinstance(tensor, FakeTensor) and (memory := tensor.untyped_storage().data_ptr()):
            by_memory.setdefault(memory, []).append(str(spec.target))
    wanted = set(targets)
    return {
        target: other
        for names in by_memory.values()
        for target, other in zip(names, names[1:] + names[:1], strict=True)
        if target in wanted and target != other
    }


def stored_tensor(program: ExportedProgram, spec: InputSpec) -> Tensor | None:
    """The value of a buffer or constant of the program."""
    if spec.kind not in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR) or spec.target is None:
        return None
    tensor = program.state_dict.get(spec.target, program.constants.get(spec.target))
    return tensor if isinstance(tensor, Tensor) else None


def cache_values(program: ExportedProgram, layers: Sequence[LayerCaches]) -> dict[str, Tensor]:
    """The traced tensor of every cache by its buffer's name."""
    values = {node.name: node.meta["val"] for node in program.graph.find_nodes(op="placeholder")}
    names = {name for layer in layers for name in (layer.k, layer.v)}
    return {target: values[name] for name, target in program.graph_signature.inputs_to_buffers.items() if target in names}


def _is_cache(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == _RANK and value.dtype.is_floating_point


def _partners(name: str) -> list[str]:
    """`name` with one of its words for keys turned into the one for values."""
    return [name[: match.start()] + _VALUES[match[0]] + name[match.end() :] for match in _KEYS.finditer(name)]

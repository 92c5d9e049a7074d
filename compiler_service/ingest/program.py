"""An exported `.pt2` program as a model: its weights, the facts a runtime needs, and the functional graph lowering starts from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from transformers import PreTrainedConfig

from compiler_service.ingest.checkpoint_files import source_files
from compiler_service.ingest.program_archive import ProgramArchive
from compiler_service.ingest.program_caches import LayerCaches, cache_values, find_caches
from compiler_service.ingest.program_graph import read_program, readable
from compiler_service.ingest.source import Source
from shared.errors import FieldOutOfRange, UnsupportedModel
from shared.kv_spec import DType, KVCacheSpec, LayerGroup, Layout

ARCHITECTURE = "ExportedProgram"
"""What the facts of such a model call it."""


@dataclass(frozen=True, slots=True)
class ProgramModel:
    """A checked program, functional, its caches found. `shapes` are its parameters; `parameters` are mapped from the file.

    Its ids of special tokens are nobody's to know: requests end by their limits and stop strings.
    """

    name: str
    config: PreTrainedConfig
    program: ExportedProgram
    layers: tuple[LayerCaches, ...]
    shapes: Mapping[str, tuple[int, ...]]
    parameters: Mapping[str, Tensor]
    tokenizer: Path
    bos_token_id: None = None
    eos_token_ids: tuple[int, ...] = ()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, values) in the order of `shapes`."""
        for name in self.shapes:
            yield name, self.parameters[name].detach()

    def require_dtype(self, dtype: str) -> None:
        """FieldOutOfRange unless the program computes in `dtype`, which its graph fixes."""
        dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in self.parameters.values()}
        dtypes |= {str(value.dtype).removeprefix("torch.") for value in self._caches().values()}
        if dtypes != {dtype}:
            raise FieldOutOfRange(
                f"dtype must be {', '.join(sorted(dtypes))}, which the program was exported in; got {dtype}", field="dtype"
            )

    def cache_spec(self, layout: Layout, page_size: int, max_len: int) -> KVCacheSpec:
        """The geometry of the program's caches. FieldOutOfRange for another `max_len` than theirs, UnsupportedModel for caches no
        pool holds."""
        values = self._caches()
        groups: dict[tuple[int, int, torch.dtype], list[int]] = {}
        for number, layer in enumerate(self.layers):
            k, v = values[layer.k], values[layer.v]
            if k.shape != v.shape or k.dtype != v.dtype:
                raise UnsupportedModel(f"a pool's keys and values have one shape; {layer.k} is {_text(k)}, {layer.v} is {_text(v)}")
            _, heads, cells, head_dim = k.shape
            if cells != max_len:
                raise FieldOutOfRange(f"max_len must be {cells}, the length of {layer.k}; got {max_len}", field="max_len")
            groups.setdefault((heads, head_dim, k.dtype), []).append(number)
        return KVCacheSpec(
            tuple(
                LayerGroup(tuple(numbers), heads, head_dim, DType(str(dtype).removeprefix("torch.")))
                for (heads, head_dim, dtype), numbers in groups.items()
            ),
            layout,
            page_size,
            max_len,
        )

    def _caches(self) -> dict[str, Tensor]:
        return cache_values(self.program, self.layers)


def open_program(source: Source) -> ProgramModel:
    """Read and check the program of `source`; its tokenizer lies beside it.

    UnsafeSource, SourceInvalid and UnsupportedModel as the parts of the reading say.
    """
    path, tokenizer = source_files(source)
    with readable(path.name):  # all of it: a graph that torch reads may still be none that it decomposes
        program = read_program(ProgramArchive(path)).run_decompositions({})
        layers = find_caches(program)
        parameters = {
            str(spec.target): program.state_dict[str(spec.target)]
            for spec in program.graph_signature.input_specs
            if spec.kind is InputKind.PARAMETER
        }
        shapes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
        return ProgramModel(source.path.name, _facts(program, layers), program, layers, shapes, parameters, tokenizer)


def _facts(program: ExportedProgram, layers: tuple[LayerCaches, ...]) -> PreTrainedConfig:
    """What the rest of the compiler asks of a configuration. A program says nothing of positions but how many cells it has."""
    values = {node.name: node.meta["val"] for node in program.graph.nodes if "val" in node.meta}
    logits = values[str(program.graph_signature.user_outputs[0])]
    if not isinstance(logits, Tensor) or not logits.dim():
        raise UnsupportedModel("the program's first output must be its logits")
    buffers = program.graph_signature.inputs_to_buffers
    cache = next(values[name] for name, target in buffers.items() if target == layers[0].k)
    return PreTrainedConfig(
        architectures=[ARCHITECTURE],
        vocab_size=int(logits.shape[-1]),
        num_hidden_layers=len(layers),
        num_attention_heads=int(cache.shape[1]),
        max_position_embeddings=int(cache.shape[2]),
    )


def _text(value: Tensor) -> str:
    return f"{value.dtype} {list(value.shape)}"

"""A decoder configuration exported as the linear program: dynamic batch and query length, caches written by index_put."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram, export
from torch.export.graph_signature import InputKind
from transformers import PreTrainedConfig, PreTrainedModel

from compiler_service.export.decoder import DecoderStep, LiftedStep, weightless_decoder
from shared.bindings import INPUT_IDS, LAST_INDEX, POSITION_IDS, WRITE_START, cache_name
from shared.errors import BuildFailed, FieldOutOfRange, InternalError
from shared.kernels.attention.ops import load_ops
from shared.kv_spec import DType, KVCacheSpec
from shared.profiles import ProfileSet

_PREFIX = "step.model."
"""Where the transformers model lives inside the exported module."""
_MAX_LEN_BOUND = 1 << 20
"""Upper end of the linear program's cache length. The engines' own limit is `KVCacheSpec.max_len`, checked on the host."""


@dataclass(frozen=True, slots=True)
class AxisRange:
    """Inclusive range of one dynamic axis of a program."""

    min: int
    max: int


@dataclass(frozen=True, slots=True)
class DecoderProgram:
    """An exported decoder step and what its names mean outside of it.

    `inputs` maps a placeholder to its binding name (shared/bindings.py), in call order. `weights` maps a parameter of the
    program to the checkpoint's tensor it is bound to; `constants` are the program's computed buffers (rotary frequencies),
    which no checkpoint holds. `batch` and `query_len` are the ranges the program accepts.
    """

    program: ExportedProgram
    cache: KVCacheSpec
    profiles: ProfileSet
    batch: AxisRange
    query_len: AxisRange
    vocab_size: int
    inputs: dict[str, str]
    weights: dict[str, str]
    constants: dict[str, Tensor]

    def placeholder(self, binding: str) -> str:
        """The placeholder that carries `binding`; KeyError if none does."""
        for placeholder, name in self.inputs.items():
            if name == binding:
                return placeholder
        raise KeyError(binding)


def export_decoder(
    config: PreTrainedConfig, spec: KVCacheSpec, profiles: ProfileSet, *, static_cache: bool = False
) -> DecoderProgram:
    """Export the decoder of `config` over the caches of `spec`; no weight is read or allocated in memory.

    The caches' length is a dynamic size of the program, or `spec.max_len` where `static_cache` asks for that.

    FieldOutOfRange when a profile is longer than the cache, UnsupportedModel when the model does something this export would
    have to ignore, BuildFailed when the program does not keep the ranges the profiles ask for.
    """
    for profile in profiles.profiles:
        if profile.query_len.max > spec.max_len:
            raise FieldOutOfRange(
                f"profile {profile} writes up to {profile.query_len.max} tokens a row into caches of {spec.max_len}; "
                f"raise max_len or shorten the profile",
                field="profiles",
            )
    load_ops()
    dtype = spec.group_of(0).dtype
    model = weightless_decoder(config, DType(dtype))
    # torch.export turns a sample size of 0 or 1 into a constant, and of a Dim that ends at 2 it keeps each tensor's size apart.
    batch, query_len = AxisRange(1, max(3, profiles.max_batch)), AxisRange(1, max(3, profiles.max_query_len))
    sample_batch, sample_len = min(3, batch.max), min(5, query_len.max)
    sample_caches = _sample_caches(spec, sample_batch, spec.max_len if static_cache else 7)
    k_cache, v_cache = sample_caches, list(map(torch.empty_like, sample_caches))
    ids = torch.zeros(sample_batch, sample_len, dtype=torch.int32)
    per_row = torch.zeros(sample_batch, dtype=torch.int32)
    batch_dim = Dim("batch", min=batch.min, max=batch.max)
    len_dim = Dim("query_len", min=query_len.min, max=query_len.max)
    cache_dims = {0: batch_dim} if static_cache else {0: batch_dim, 2: Dim("max_len", min=2, max=_MAX_LEN_BOUND)}
    with torch.no_grad():  # torch 2.11 would keep the model's own no_grad as a graph inside the graph
        program = export(
            LiftedStep(DecoderStep(model, spec)),
            (ids, ids.clone(), per_row, per_row.clone(), k_cache, v_cache),
            dynamic_shapes={
                INPUT_IDS: {0: batch_dim, 1: len_dim},
                POSITION_IDS: {0: batch_dim, 1: len_dim},
                WRITE_START: {0: batch_dim},
                LAST_INDEX: {0: batch_dim},
                "k_cache": [cache_dims] * spec.num_layers,
                "v_cache": [cache_dims] * spec.num_layers,
            },
            strict=False,
        )
    bindings = [INPUT_IDS, POSITION_IDS, WRITE_START, LAST_INDEX]
    bindings += [cache_name(layer, kind) for kind in ("k", "v") for layer in range(spec.num_layers)]
    inputs = dict(zip(program.graph_signature.user_inputs, bindings, strict=True))
    _check_range(program, next(iter(inputs)), 0, batch)
    _check_range(program, next(iter(inputs)), 1, query_len)
    return DecoderProgram(
        program=program,
        cache=spec,
        profiles=profiles,
        batch=batch,
        query_len=query_len,
        vocab_size=config.vocab_size,
        inputs=inputs,
        weights=_weights(program, model),
        constants=_constants(program, model),
    )


def _sample_caches(spec: KVCacheSpec, batch: int, max_len: int) -> list[Tensor]:
    """Never filled: tracing reads their shapes, so a long cache takes addresses and no memory."""
    return [
        torch.empty(batch, group.kv_heads, max_len, group.head_dim, dtype=getattr(torch, group.dtype.value))
        for _, group in spec.iter_layers()
    ]


def _check_range(program: ExportedProgram, placeholder: str, axis: int, wanted: AxisRange) -> None:
    """BuildFailed unless `axis` of `placeholder` is dynamic over exactly `wanted`."""
    node = next(n for n in program.graph.nodes if n.name == placeholder)
    size = node.meta["val"].shape[axis]
    if isinstance(size, int):
        raise BuildFailed(f"axis {axis} of {placeholder} must range over {wanted.min}..{wanted.max}; the export fixed it to {size}")
    stored = program.range_constraints[size.node.expr]
    if (int(stored.lower), int(stored.upper)) != (wanted.min, wanted.max):
        raise BuildFailed(
            f"axis {axis} of {placeholder} must range over {wanted.min}..{wanted.max}; "
            f"the export kept {stored.lower}..{stored.upper}"
        )


def _weights(program: ExportedProgram, model: PreTrainedModel) -> dict[str, str]:
    """Parameter of the program -> checkpoint name. Tied parameters are stored under the name they are tied to."""
    tied = dict(model.all_tied_weights_keys)
    weights = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.PARAMETER:
            assert spec.target is not None
            name = spec.target.removeprefix(_PREFIX)
            weights[spec.target] = tied.get(name, name)
    return weights


def _constants(program: ExportedProgram, model: PreTrainedModel) -> dict[str, Tensor]:
    """The buffers the program reads, by the program's name for them."""
    buffers = dict(model.named_buffers())
    constants = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.BUFFER:
            assert spec.target is not None
            name = spec.target.removeprefix(_PREFIX)
            if name not in buffers:
                raise InternalError(f"the export holds a buffer {spec.target} which the model does not")
            constants[spec.target] = buffers[name].detach().clone()
    return constants

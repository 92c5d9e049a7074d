"""Verify a built engine against the export it came from, on the model's own weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, fx
from torch.nn.functional import pad
from torch.utils import _pytree as pytree

from compiler_service.backends.backend import BuiltEngine
from compiler_service.backends.inductor.exact import Float32, farther_than_rounding
from compiler_service.export.program import DecoderProgram
from shared.bindings import INPUT_IDS, LAST_INDEX, POSITION_IDS, WRITE_START, cache_name
from shared.errors import BuildFailed, UnsupportedModel
from shared.inductor.files import CONSTANTS_FILE, PACKAGE_DIRECTORY
from shared.inductor.package import BoundPackage, Package
from shared.inductor.probe import Run, find_faults, without_positions
from shared.inductor.sample_step import LEAST_COSINE, SampleStep, gather_rows, logits_differ, sample_step, scatter_rows
from shared.profiles import OptimizationProfile

_HISTORY = 3


def verify_engine(built: BuiltEngine, exported: DecoderProgram, weights: Path) -> None:
    """BuildFailed unless the engine gives the logits of the exported linear program, run eagerly, at the smallest, the usual
    and the largest shape of every profile, and passes the probe that every load repeats.

    `exported` is the program before any lowering; `weights` the model's safetensors file.
    """
    device = built.target.device
    tensors = load_file(weights, device=device)
    package = _bind(built, tensors)
    reference = _eager(exported, tensors)
    run = package.run if POSITION_IDS in exported.inputs.values() else without_positions(package.run)
    for profile in exported.profiles.profiles:
        for batch, query_len in _shapes(profile):
            _compare(run, reference, exported, profile.name, batch, query_len, device)
    if faults := find_faults(run, exported.cache, exported.profiles, exported.vocab_size, device):
        raise BuildFailed(f"the engine fails its probe: {'; '.join(faults)}")


def _bind(built: BuiltEngine, tensors: dict[str, Tensor]) -> BoundPackage:
    device = built.target.device
    constants = load_file(built.directory / CONSTANTS_FILE, device=device)
    constants |= {name: tensors[stored] for name, stored in built.constants.items()}
    return Package(built.directory / PACKAGE_DIRECTORY, device).bind(constants)


def _eager(exported: DecoderProgram, tensors: dict[str, Tensor]) -> fx.GraphModule:
    module = exported.program.module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    module.load_state_dict({name: tensors[stored] for name, stored in exported.weights.items()}, strict=False, assign=True)
    return module


def _shapes(profile: OptimizationProfile) -> Iterator[tuple[int, int]]:
    batch, query_len = profile.batch, profile.query_len
    yield from dict.fromkeys(((batch.min, query_len.min), (batch.opt, query_len.opt), (batch.max, query_len.max)))


def _compare(
    run: Run,
    reference: fx.GraphModule,
    exported: DecoderProgram,
    profile: str,
    batch: int,
    query_len: int,
    device: str,
) -> None:
    start = min(_HISTORY, exported.cache.max_len - query_len)
    text = sample_step(exported.cache, exported.vocab_size, batch=batch, query_len=start + query_len, start=0, device=device)
    step, caches = text.chunk(slice(start, start + query_len)), _caches(exported, text)
    try:
        if start:
            # The model's own history, as in service: behind noise, rounding in bfloat16 alone can turn its logits around.
            _run_linear(reference, exported, text.chunk(slice(0, start)), caches)
            for layer, pool in enumerate(text.pools):
                keys, values = (caches[cache_name(layer, kind)][:, :, :start] for kind in "kv")
                scatter_rows(exported.cache, pool, text.block_table, keys, values)
        wanted = _run_linear(reference, exported, step, caches)
    except RuntimeError as error:  # an assertion of the program's own
        raise UnsupportedModel(
            f"the program itself does not run with batch {batch} and query length {query_len}, which profile {profile} asks for: "
            f"{error}. Export it so that it does, or ask for other profiles"
        ) from error
    try:
        got = run(step.inputs)
    except RuntimeError as error:
        raise BuildFailed(f"profile {profile} does not run with batch {batch} and query length {query_len}: {error}") from error
    difference = logits_differ(got, wanted, step.pools[0].dtype)
    if difference and step.pools[0].dtype is torch.bfloat16:
        exact = _run_linear(Float32(reference), exported, step, {name: cache.float() for name, cache in caches.items()})
        difference = farther_than_rounding(got, wanted, exact, LEAST_COSINE[torch.bfloat16])
    if difference:
        raise BuildFailed(f"profile {profile} with batch {batch} and query length {query_len}: {difference}")


def _caches(exported: DecoderProgram, text: SampleStep) -> dict[str, Tensor]:
    """Linear caches by their names, as long as the text or as the program wants them: copies of what the pools hold."""
    traced = {node.name: node.meta["val"] for node in exported.program.graph.find_nodes(op="placeholder")}
    caches = {}
    for layer, pool in enumerate(text.pools):
        rows = gather_rows(exported.cache, pool, text.block_table, text.input_ids.shape[1])
        for kind, held in zip("kv", rows, strict=True):
            length = traced[exported.placeholder(cache_name(layer, kind))].shape[2]
            missing = length - held.shape[2] if isinstance(length, int) else 0
            caches[cache_name(layer, kind)] = pad(held, (0, 0, 0, missing))
    return caches


def _run_linear(
    reference: fx.GraphModule | Float32, exported: DecoderProgram, step: SampleStep, caches: dict[str, Tensor]
) -> Tensor:
    """Logits; the new keys and values are written into `caches`."""
    tokens = (step.input_ids, step.position_ids, step.write_start, step.last_index)
    given = caches | dict(zip((INPUT_IDS, POSITION_IDS, WRITE_START, LAST_INDEX), tokens, strict=True))
    inputs = [given[binding] for binding in exported.inputs.values()]
    with torch.no_grad():
        if isinstance(reference, Float32):
            (logits,) = pytree.tree_leaves(reference.run(*inputs, enable_io_processing=False))
        else:
            args, kwargs = pytree.tree_unflatten(inputs, exported.program.call_spec.in_spec)
            logits = reference(*args, **kwargs)
    assert isinstance(logits, Tensor)
    return logits

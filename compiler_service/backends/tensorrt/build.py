"""From a proven linear program to one serialized TensorRT engine with ordered profiles, and the record of what it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from compiler_service.backends.backend import BuiltEngine, Progress
from compiler_service.backends.tensorrt.host import without_gpu
from compiler_service.export.program import DecoderProgram
from compiler_service.proof.certificate import ProofReport
from shared.bindings import (
    LOGITS,
    PACKED_ENDS,
    PACKED_OFFSETS,
    PACKED_ORDER,
    AliasedBinding,
    BindingSpec,
    Role,
    cache_name,
    pool_name,
    updated_name,
)
from shared.errors import BuildFailed
from shared.kv_spec import KVCacheSpec, Layout
from shared.manifest import Target
from shared.profiles import OptimizationProfile
from shared.tensorrt.files import PLAN_FILE


def build_engine(
    program: DecoderProgram,
    report: ProofReport,
    target: Target,
    toolchain: dict[str, str],
    directory: Path,
    progress: Progress,
    constants: Mapping[str, Tensor] | None = None,
    *,
    allow_copying: bool = False,
) -> BuiltEngine:
    """Build `program`, whose writes `report` proves, for the compute capabilities of `target` into the empty `directory`.

    Needs shapes only: weights are bound when the engine is loaded, unless `constants` (the model's tensors by checkpoint name, on
    the host) puts them into the plan. WriteNotProven and UnsupportedModel as `build_network`; BuildFailed when TensorRT fails
    or when a cache whose write is proven would not be written in place.
    """
    with without_gpu():
        import torch_tensorrt  # noqa: F401 - makes either flavour importable as `tensorrt`, which what follows imports

        from compiler_service.backends.tensorrt.network import build_network
        from compiler_service.backends.tensorrt.plan import Builder

        builder = Builder()
        network = build_network(builder.network, program, report, constants, allow_copying=allow_copying)
        copied = f", {len(network.copied)} copied: {', '.join(network.copied)}" if network.copied else ""
        progress(0.1, f"{builder.network.num_layers} layers, {len(network.aliases)} aliased caches{copied}")
        check_aliases(network.aliases, cache_bindings(program.cache).difference(network.copied))
        shapes = [_shapes(profile, network.bindings, program.cache) for profile in program.profiles.profiles]
        plan = builder.build(shapes, target.compute_capabilities, lambda done, what: progress(0.1 + 0.9 * done, what))
    (directory / PLAN_FILE).write_bytes(plan)
    return BuiltEngine(
        directory=directory,
        target=target,
        toolchain=toolchain,
        bindings=tuple(network.bindings),
        aliases=tuple(network.aliases),
        constants={binding.name: binding.name for binding in network.bindings if binding.role is Role.WEIGHT},
    )


def cache_bindings(cache: KVCacheSpec) -> set[str]:
    """Names of what the engine writes: K and V of every layer, or every layer's pool."""
    layers = range(cache.num_layers)
    if cache.layout is Layout.PAGED:
        return set(map(pool_name, layers))
    return {cache_name(layer, kind) for layer in layers for kind in "kv"}


def check_aliases(aliases: list[AliasedBinding], wanted: set[str]) -> None:
    """BuildFailed unless every cache has exactly one output at its address: a promise of the proof the engine must keep."""
    aliased = [alias.input for alias in aliases]
    if lost := sorted(wanted.difference(aliased)):
        raise BuildFailed(f"{len(lost)} of {len(wanted)} caches are not written in place, {lost[0]} the first of them")
    if len(aliased) != len(wanted):
        raise BuildFailed(f"{len(wanted)} aliased outputs expected, one a cache; got {len(aliased)}")


LEAST_PAGES = 2
"""The dump page and one more."""
MOST_ELEMENTS = (1 << 31) - 1

Extent = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Least, usual and largest shape of a binding."""


def _shapes(profile: OptimizationProfile, bindings: list[BindingSpec], cache: KVCacheSpec) -> dict[str, Extent]:
    """The extent of every dynamic input: axis 0 counts rows, axis 1 of the tokens their length; of pools, axis 0 their rows."""
    outputs = {LOGITS, *(updated_name(binding.name) for binding in bindings)}
    pooled = pool_extents(profile, cache) if cache.layout is Layout.PAGED else {}
    dynamic = [b for b in bindings if None in b.shape and b.name not in outputs]
    return {b.name: _extent(profile, b, pooled.get(b.name) or pooled.get(b.role)) for b in dynamic}


def pool_extents(profile: OptimizationProfile, cache: KVCacheSpec) -> dict[str, tuple[int, int, int]]:
    """Least, usual and largest size of the first axis of what depends on the pool, by binding name or role."""
    most = most_pages(cache)
    rows = (2 * LEAST_PAGES, 2 * min(profile.batch.opt * cache.max_pages + 1, most), 2 * most)
    new = [2 * getattr(profile.batch, size) * getattr(profile.query_len, size) for size in ("min", "opt", "max")]
    # A row that is padded writes fewer rows than it has tokens.
    return {
        Role.CACHE: rows,
        PACKED_OFFSETS: rows,
        PACKED_ENDS: (rows[0] + 1, rows[1] + 1, rows[2] + 1),
        PACKED_ORDER: (2, new[1], new[2]),
    }


def most_pages(cache: KVCacheSpec) -> int:
    """Pages of the largest pool an engine takes: TensorRT counts the elements of a tensor in 31 bits."""
    largest = max(2 * group.kv_heads * cache.page_size * group.head_dim for group in cache.groups)
    return MOST_ELEMENTS // largest


def _extent(profile: OptimizationProfile, binding: BindingSpec, first: tuple[int, int, int] | None) -> Extent:
    def at(index: int, size: str) -> tuple[int, ...]:
        ranges: tuple[Any, ...] = (profile.batch, profile.query_len)
        sizes = tuple(getattr(ranges[axis], size) if dim is None else dim for axis, dim in enumerate(binding.shape))
        return sizes if first is None else (first[index], *sizes[1:])

    return at(0, "min"), at(1, "opt"), at(2, "max")

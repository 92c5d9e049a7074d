"""From a proven linear program to one serialized TensorRT engine with ordered profiles, and the record of what it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compiler_service.backends.backend import BuiltEngine, Progress
from compiler_service.backends.tensorrt.host import without_gpu
from compiler_service.export.program import DecoderProgram
from compiler_service.proof.certificate import ProofReport
from shared.bindings import LOGITS, AliasedBinding, BindingSpec, Role, cache_name, updated_name
from shared.errors import BuildFailed
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
) -> BuiltEngine:
    """Build `program`, whose writes `report` proves, for the compute capabilities of `target` into the empty `directory`.

    Needs shapes only: no weight is read. WriteNotProven and UnsupportedModel as `build_network`; BuildFailed when TensorRT fails
    or when a cache would not be written in place.
    """
    with without_gpu():
        import torch_tensorrt  # noqa: F401 - makes either flavour importable as `tensorrt`, which what follows imports

        from compiler_service.backends.tensorrt.network import build_network
        from compiler_service.backends.tensorrt.plan import Builder

        builder = Builder()
        network = build_network(builder.network, program, report)
        progress(0.1, f"{builder.network.num_layers} layers, {len(network.aliases)} aliased caches")
        check_aliases(network.aliases, program.cache.num_layers)
        shapes = [_shapes(profile, network.bindings) for profile in program.profiles.profiles]
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


def check_aliases(aliases: list[AliasedBinding], num_layers: int) -> None:
    """BuildFailed unless every cache has exactly one output at its address: a promise of the proof the engine must keep."""
    aliased = [alias.input for alias in aliases]
    wanted = {cache_name(layer, kind) for layer in range(num_layers) for kind in "kv"}
    if lost := sorted(wanted.difference(aliased)):
        raise BuildFailed(f"{len(lost)} of {len(wanted)} caches are not written in place, {lost[0]} the first of them")
    if len(aliased) != len(wanted):
        raise BuildFailed(f"{len(wanted)} aliased outputs expected, one a cache; got {len(aliased)}")


Extent = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Least, usual and largest shape of a binding."""


def _shapes(profile: OptimizationProfile, bindings: list[BindingSpec]) -> dict[str, Extent]:
    """The extent of every dynamic input: axis 0 counts rows, axis 1 of the tokens their length."""
    outputs = {LOGITS, *(updated_name(binding.name) for binding in bindings)}
    return {b.name: _extent(profile, b) for b in bindings if None in b.shape and b.name not in outputs}


def _extent(profile: OptimizationProfile, binding: BindingSpec) -> Extent:
    def at(size: str) -> tuple[int, ...]:
        ranges: tuple[Any, ...] = (profile.batch, profile.query_len)
        return tuple(getattr(ranges[axis], size) if dim is None else dim for axis, dim in enumerate(binding.shape))

    return at("min"), at("opt"), at("max")

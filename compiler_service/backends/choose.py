"""The backend of a spec."""

from __future__ import annotations

from compiler_service.backends.backend import Backend
from compiler_service.backends.inductor.backend import InductorBackend
from compiler_service.backends.tensorrt.backend import TensorRTBackend
from compiler_service.backends.tensorrt.flavour import Flavour
from compiler_service.spec import CompileSpec


def choose_backend(spec: CompileSpec) -> Backend:
    """BackendUnavailable, before any work is done, where this host cannot build for it."""
    if spec.backend == "inductor":
        return InductorBackend.for_target(spec.targets[0])
    return TensorRTBackend.for_targets(
        Flavour(spec.backend),
        spec.targets,
        spec.layout,
        allow_copying=spec.allow_copying,
        constant_weights=spec.constant_weights,
    )

"""Which TensorRT this host has: the RTX flavour builds anywhere, the datacentre flavour builds on the GPU it builds for."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from enum import StrEnum

import torch

from shared.errors import BackendUnavailable, FieldOutOfRange


class Flavour(StrEnum):
    """The values are the modules' and the backends' names."""

    RTX = "tensorrt_rtx"
    DATACENTRE = "tensorrt"


_CAPABILITIES = {
    Flavour.RTX: ("sm75", "sm80", "sm86", "sm89", "sm120", "sm121"),
    Flavour.DATACENTRE: ("sm75", "sm80", "sm86", "sm89", "sm90", "sm100", "sm120"),
}


def require_buildable(flavour: Flavour, targets: tuple[str, ...]) -> None:
    """BackendUnavailable, saying what is missing, unless this host can build engines of `flavour`; FieldOutOfRange for a target
    the flavour does not know. Imports nothing, so it costs nothing before the work starts."""
    if unknown := [target for target in targets if target not in _CAPABILITIES[flavour]]:
        known = ", ".join(_CAPABILITIES[flavour])
        newer = " (newer GPUs run engines for older ones)" if flavour is Flavour.RTX else ""
        raise FieldOutOfRange(f"targets must be of {known} for {flavour}{newer}; got {', '.join(unknown)}", field="targets")
    for module in (flavour.value, "torch_tensorrt"):
        if importlib.util.find_spec(module) is None:
            raise BackendUnavailable(f"building for {flavour} needs the Python package {module}; it is not installed here")
    if flavour is Flavour.DATACENTRE and not torch.cuda.is_available():
        raise BackendUnavailable(
            f"building for {flavour} needs an NVIDIA GPU of the target's kind, because its kernels are timed on it; this host "
            f"has none. Build for {Flavour.RTX}, which needs no GPU, or build on a host with one"
        )


def build_toolchain(flavour: Flavour) -> dict[str, str]:
    """Every version that decides what a build makes. `flavour` names the one the runtime must have too."""
    packages = ("torch", "transformers")
    return {
        flavour.value: importlib.metadata.version(flavour.value),
        "torch_tensorrt": importlib.metadata.version("torch_tensorrt_rtx" if flavour is Flavour.RTX else "torch_tensorrt"),
        **{package: importlib.metadata.version(package) for package in packages},
    }

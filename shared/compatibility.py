"""Whether a device can run an engine, decided from the engine's manifest and a description of the device alone. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from shared.manifest import EngineManifest

MUST_MATCH = ("torch", "ops")
"""Toolchain entries that have to be equal where an engine is built and where it runs (shared/inductor/toolchain.py)."""
_TENSORRT = ("tensorrt_rtx", "tensorrt")
"""Backends whose plans ask for their own library alone, whose version the toolchain has under the backend's name."""
_WIDER_VECTORS = "avx512f"


@dataclass(frozen=True, slots=True)
class Device:
    """A device as its own runtime describes it. `compute_capability` (`sm90`) is empty on a CPU."""

    kind: str
    isa: frozenset[str]
    compute_capability: str
    toolchain: Mapping[str, str]


class Level(StrEnum):
    OPTIMAL = "optimal"
    PREFER_RECOMPILE = "prefer_recompile"
    """Runs, but an engine built for this device would be faster."""
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True, slots=True)
class Compatibility:
    """`field` is the first that stands in the way, with both sides; empty where nothing does."""

    level: Level
    field: str = ""
    expected: str = ""
    got: str = ""


def compare(manifest: EngineManifest, device: Device) -> Compatibility:
    """What `device` makes of the engine of `manifest`."""
    target = manifest.target
    if device.kind != target.device:
        return Compatibility(Level.UNSUPPORTED, "target.device", target.device, device.kind)
    if target.device == "cpu" and (missing := sorted(set(target.isa) - device.isa)):
        return Compatibility(Level.UNSUPPORTED, "target.isa", " ".join(target.isa), f"a CPU without {' '.join(missing)}")
    exact = target.device != "cuda" or device.compute_capability in target.compute_capabilities
    if not exact and not _runs_older_code(manifest, device):
        wanted = " ".join(target.compute_capabilities)
        return Compatibility(Level.UNSUPPORTED, "target.compute_capabilities", wanted, device.compute_capability or "none stated")
    for name in (manifest.backend,) if manifest.backend in _TENSORRT else MUST_MATCH:
        built, here = manifest.toolchain.get(name, "none stated"), device.toolchain.get(name, "none stated")
        if built != here:
            return Compatibility(Level.UNSUPPORTED, f"toolchain.{name}", built, here)
    if target.device == "cpu" and _WIDER_VECTORS in device.isa and _WIDER_VECTORS not in target.isa:
        return Compatibility(Level.PREFER_RECOMPILE, "target.isa", f"built without {_WIDER_VECTORS}", "a CPU that has it")
    if not exact:
        built, here = " ".join(target.compute_capabilities), device.compute_capability
        return Compatibility(Level.PREFER_RECOMPILE, "target.compute_capabilities", built, here)
    return Compatibility(Level.OPTIMAL)


def _runs_older_code(manifest: EngineManifest, device: Device) -> bool:
    """Plans of TensorRT-RTX for an older GPU run on a newer one; those of the datacentre library run on their own kind alone."""
    if manifest.backend != "tensorrt_rtx" or not device.compute_capability:
        return False
    return any(_number(built) <= _number(device.compute_capability) for built in manifest.target.compute_capabilities)


def _number(capability: str) -> int:
    return int(capability.removeprefix("sm"))

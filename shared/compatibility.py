"""Whether a device can run an engine, decided from the engine's manifest and a description of the device alone. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from shared.manifest import EngineManifest

MUST_MATCH = ("torch", "ops")
"""Toolchain entries that have to be equal where an engine is built and where it runs (shared/inductor/toolchain.py)."""
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
    if target.device == "cuda" and device.compute_capability not in target.compute_capabilities:
        wanted = " ".join(target.compute_capabilities)
        return Compatibility(Level.UNSUPPORTED, "target.compute_capabilities", wanted, device.compute_capability or "none stated")
    for name in MUST_MATCH:
        built, here = manifest.toolchain.get(name, "none stated"), device.toolchain.get(name, "none stated")
        if built != here:
            return Compatibility(Level.UNSUPPORTED, f"toolchain.{name}", built, here)
    if target.device == "cpu" and _WIDER_VECTORS in device.isa and _WIDER_VECTORS not in target.isa:
        return Compatibility(Level.PREFER_RECOMPILE, "target.isa", f"built without {_WIDER_VECTORS}", "a CPU that has it")
    return Compatibility(Level.OPTIMAL)

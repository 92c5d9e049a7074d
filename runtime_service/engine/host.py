"""Whether this host can run an engine, by the manifest alone: nothing of the engine is mapped yet."""

from __future__ import annotations

from runtime_service.engine.requirement import require
from runtime_service.engine.tensorrt import library
from shared.compatibility import Device, Level, compare
from shared.gpu import compute_capability
from shared.inductor.isa import host_features
from shared.inductor.toolchain import runtime_toolchain
from shared.manifest import EngineManifest


def check_host(manifest: EngineManifest) -> None:
    """EngineIncompatible, naming the field, unless this host has the device and the libraries the engine was built for."""
    if manifest.backend not in library.BACKENDS:
        require("backend", "inductor", manifest.backend)
    found = compare(manifest, _device_for(manifest))
    if found.level is Level.UNSUPPORTED:
        require(found.field, found.expected, found.got)


def _device_for(manifest: EngineManifest) -> Device:
    """The device of this host that the engine would run on."""
    capability = compute_capability()
    if manifest.backend in library.BACKENDS:
        if not capability:
            return Device("a host without an NVIDIA GPU that torch can use", frozenset(), "", {})
        return Device("cuda", frozenset(), capability, {manifest.backend: library.version(manifest.backend)})
    if manifest.target.device == "cuda" and capability:
        return Device("cuda", frozenset(), capability, runtime_toolchain())
    return Device("cpu", host_features(), "", runtime_toolchain())

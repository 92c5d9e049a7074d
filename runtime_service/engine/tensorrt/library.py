"""The TensorRT library an engine asks for and the GPU it would run on, looked at before anything of the engine is loaded."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from shared.compatibility import Device, Level, compare
from shared.errors import EngineIncompatible
from shared.gpu import compute_capability
from shared.manifest import EngineManifest
from shared.tensorrt.precision import disable_tf32

BACKENDS = ("tensorrt_rtx", "tensorrt")
"""Backend names, which are the modules' names too."""


def check_host(manifest: EngineManifest) -> None:
    """EngineIncompatible, naming the field, unless the GPU and the library are those the engine was built for."""
    found = compare(manifest, _this_device(manifest.backend))
    if found.level is Level.UNSUPPORTED:
        raise EngineIncompatible(
            f"{found.field}: the engine needs {found.expected}, here is {found.got}; compile it again for this host",
            details={"field": found.field, "expected": found.expected, "got": found.got},
        )


def load_library(backend: str) -> ModuleType:
    """The module of either flavour; both have the same names in them."""
    disable_tf32()
    return importlib.import_module(backend)


def _this_device(backend: str) -> Device:
    capability = compute_capability()
    if not capability:
        return Device("a host without an NVIDIA GPU that torch can use", frozenset(), "", {})
    installed = importlib.util.find_spec(backend) is not None
    version = load_library(backend).__version__ if installed else "not installed"
    return Device("cuda", frozenset(), capability, {backend: version})

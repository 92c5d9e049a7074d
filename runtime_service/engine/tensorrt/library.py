"""The TensorRT library an engine asks for, and whether this host's GPU is one it was built for. Nothing is loaded before."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch

from shared.errors import EngineIncompatible
from shared.manifest import EngineManifest

BACKENDS = ("tensorrt_rtx", "tensorrt")
"""Backend names, which are the modules' names too."""


def check_host(manifest: EngineManifest) -> None:
    """EngineIncompatible, naming the field, unless the GPU and the library are those the engine was built for."""
    _require(manifest.backend in BACKENDS, "backend", " or ".join(BACKENDS), manifest.backend)
    _require(manifest.target.device == "cuda", "target.device", "cuda", manifest.target.device)
    _require(torch.cuda.is_available(), "target.device", "cuda", "no NVIDIA GPU that torch can use")
    major, minor = torch.cuda.get_device_capability()
    capabilities = manifest.target.compute_capabilities
    runs = _runs(manifest.backend, [int(name.removeprefix("sm")) for name in capabilities], 10 * major + minor)
    _require(runs, "target.compute_capabilities", ", ".join(capabilities), f"sm{major}{minor}")
    installed = importlib.util.find_spec(manifest.backend) is not None
    expected = manifest.toolchain.get(manifest.backend, "a version the manifest does not state")
    got = load_library(manifest.backend).__version__ if installed else "not installed"
    _require(got == expected, f"toolchain.{manifest.backend}", expected, got)


def load_library(backend: str) -> Any:
    """The module of either flavour; both have the same names in them."""
    return importlib.import_module(backend)


def _runs(backend: str, targets: list[int], device: int) -> bool:
    """RTX plans hold code that newer GPUs run too; plans of the datacentre library run on what they were timed on."""
    return any(target <= device for target in targets) if backend == "tensorrt_rtx" else device in targets


def _require(holds: bool, field: str, expected: str, got: str) -> None:
    if not holds:
        raise EngineIncompatible(
            f"{field}: the engine needs {expected}, here is {got}; compile it again for this host",
            details={"field": field, "expected": expected, "got": got},
        )

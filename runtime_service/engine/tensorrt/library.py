"""The TensorRT library an engine asks for: either flavour by one import."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from shared.tensorrt.precision import disable_tf32

BACKENDS = ("tensorrt_rtx", "tensorrt")
"""Backend names, which are the modules' names too."""


def load_library(backend: str) -> ModuleType:
    """The module of either flavour; both have the same names in them."""
    disable_tf32()
    return importlib.import_module(backend)


def version(backend: str) -> str:
    installed = importlib.util.find_spec(backend) is not None
    return load_library(backend).__version__ if installed else "not installed"

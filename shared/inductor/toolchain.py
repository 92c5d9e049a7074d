"""The versions an engine's machine code depends on, as the loaded libraries state them."""

from __future__ import annotations

import hashlib

import torch

from shared.kernels.attention.ops import SCHEMAS

TORCH = "torch"
ATTENTION_OPS = "attention_ops"


def runtime_toolchain() -> dict[str, str]:
    """What must be equal where an engine is built and where it runs: torch's release and the schemas of our ops.

    torch's local version (`+cpu`, `+cu130`) is left out: those builds of one release share the interface a CPU engine uses.
    """
    return {
        TORCH: torch.__version__.split("+", 1)[0],
        ATTENTION_OPS: hashlib.sha256("\n".join(SCHEMAS).encode()).hexdigest()[:16],
    }

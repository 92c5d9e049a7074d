"""The versions an engine's machine code depends on, as the loaded libraries state them."""

from __future__ import annotations

import hashlib

import torch

from shared.kernels.attention import ops as attention
from shared.kernels.linear import ops as linear

TORCH = "torch"
OPS = "ops"
CPU_ISA = "cpu_isa"
"""The vector instructions Inductor generated for, in its own words; read back from the package when it is loaded."""


def load_ops() -> None:
    """Register every op an engine may call. Idempotent; compiles their kernels on a machine's first use."""
    attention.load_ops()
    linear.load_ops()


def runtime_toolchain() -> dict[str, str]:
    """What must be equal where an engine is built and where it runs: torch's release and the schemas of our ops.

    torch's local version (`+cpu`, `+cu130`) is left out: those builds of one release share the interface a CPU engine uses.
    """
    load_ops()
    ops = (torch.ops.quire.attend, torch.ops.quire.paged_attend, torch.ops.quire.linears)
    schemas = [str(op.default._schema) for op in ops]
    return {
        TORCH: torch.__version__.split("+", 1)[0],
        OPS: hashlib.sha256("\n".join(schemas).encode()).hexdigest()[:16],
    }

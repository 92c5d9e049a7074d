"""float32 means float32: TensorRT multiplies in TF32 otherwise, whose products are good to three digits."""

from __future__ import annotations

import os

_VARIABLE = "NVIDIA_TF32_OVERRIDE"


def disable_tf32() -> None:
    """Turn TF32 off for TensorRT in this process. To be called before a plan is built, and before one is loaded.

    The builder's own flag does not reach the kernels that TensorRT-RTX compiles when it loads a plan, and a plan loads only where
    the variable is as it was when it was built; hence always, and in both places.
    """
    os.environ[_VARIABLE] = "0"

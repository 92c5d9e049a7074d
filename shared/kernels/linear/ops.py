"""`quire::linears`: several projections of the same rows, `[x @ w.T for w in weights]`, fast where the rows are few.

x is `[..., in]`, every weight `[out, in]` of x's dtype; results are `[..., out]`, sums in float32, rounded once. A decode step is
bound by reading its weights: up to eight rows share one pass over them, and one call serves the weights that share an input.
`load_ops()` registers the op; importing this module registers nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.kernels.build import load_library, vector_macros

_log = logging.getLogger(__name__)

LINEARS = "quire::linears"
_SCHEMA = "(Tensor x, Tensor[] weights) -> Tensor[]"
_FOLDER = Path(__file__).parent
_HEADERS = (_FOLDER / "few_rows.h", _FOLDER.parent / "attention" / "cpu" / "vec.h")

_lock = threading.Lock()
_loaded = False


def load_ops() -> None:
    """Define the op and register what runs it on this host: the compiled kernel or, with a warning, torch's own linear.

    Idempotent and thread-safe. The first call of a machine compiles the kernel; BuildFailed when its compiler rejects it.
    """
    global _loaded
    with _lock:
        if _loaded:
            return
        compiled = load_library("linear", [_FOLDER / "ops.cpp"], vector_macros(), _HEADERS)
        torch.library.define(LINEARS, _SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.register_fake(LINEARS, _shapes)
        if compiled is None:
            _log.warning("projections of few rows run on torch's matrix product, up to twice as slow as the compiled kernel")
            torch.library.impl(LINEARS, "CPU", reference)
        if torch.cuda.is_available():
            _register_cuda()
        _loaded = True


def _register_cuda() -> None:
    from shared.kernels.linear.triton import launch  # here, because hosts without a GPU need not have Triton

    torch.library.impl(LINEARS, "CUDA", launch.linears)


def reference(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """The op in torch."""
    return [F.linear(x, weight) for weight in weights]


def _shapes(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    return [x.new_empty((*x.shape[:-1], weight.shape[0])) for weight in weights]

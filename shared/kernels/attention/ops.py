"""`quire::attend` and `quire::paged_attend`: schemas, shapes for export, and the implementation of each device.

`load_ops()` registers everything; importing this module registers nothing. The schemas are defined here, once, so that exported
programs and AOTInductor packages find the ops whichever implementation serves them; compiled libraries only add kernels.
"""

from __future__ import annotations

import logging
import threading
from enum import StrEnum

import torch
from torch import Tensor

from shared.kernels.attention import reference
from shared.kernels.attention.checks import check_attend, check_paged_attend
from shared.kernels.attention.cpu.library import load_kernels

_log = logging.getLogger(__name__)

ATTEND = "quire::attend"
PAGED_ATTEND = "quire::paged_attend"
_SCHEMAS = {
    ATTEND: "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor start, "
    "float scale, int? window, float? softcap, Tensor? sinks) -> Tensor",
    PAGED_ATTEND: "(Tensor q, Tensor k, Tensor v, Tensor(a!) pool, Tensor block_table, Tensor start, int page_dim, "
    "float scale, int? window, float? softcap, Tensor? sinks) -> Tensor",
}


class Implementation(StrEnum):
    """What runs the ops on the CPU."""

    CPP = "cpp"
    REFERENCE = "reference"


_lock = threading.Lock()
_loaded: Implementation | None = None


def load_ops() -> None:
    """Define the ops and register what runs them on this host. Idempotent and thread-safe.

    The first call of a machine compiles the CPU kernels, about half a minute; BuildFailed when its compiler rejects them.
    """
    implementation()


def implementation() -> Implementation:
    """What runs the ops on the CPU, loading them first: the compiled kernels or, with a warning, the reference."""
    global _loaded
    with _lock:
        if _loaded is None:
            compiled = load_kernels() is not None  # may raise, so it comes before anything that cannot be done twice
            _define()
            if not compiled:
                _log.warning("attention on the CPU runs on the reference, many times slower than compiled kernels")
                torch.library.impl(ATTEND, "CPU", _checked_attend)
                torch.library.impl(PAGED_ATTEND, "CPU", _checked_paged_attend)
            if torch.cuda.is_available():
                _register_cuda()
            _loaded = Implementation.CPP if compiled else Implementation.REFERENCE
        return _loaded


def _define() -> None:
    for name, schema in _SCHEMAS.items():
        torch.library.define(name, schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(ATTEND, _output_of_attend)
    torch.library.register_fake(PAGED_ATTEND, _output_of_paged_attend)


def _register_cuda() -> None:
    from shared.kernels.attention.triton import launch  # here, because hosts without a GPU need not have Triton

    torch.library.impl(ATTEND, "CUDA", launch.attend)
    torch.library.impl(PAGED_ATTEND, "CUDA", launch.paged_attend)


def _checked_attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    start: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    check_attend(q, k_cache, v_cache, start, window, softcap, sinks)
    return reference.attend(q, k_cache, v_cache, start, scale, window, softcap, sinks)


def _checked_paged_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pool: Tensor,
    block_table: Tensor,
    start: Tensor,
    page_dim: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    check_paged_attend(q, k, v, pool, block_table, start, page_dim, window, softcap, sinks)
    return reference.paged_attend(q, k, v, pool, block_table, start, page_dim, scale, window, softcap, sinks)


def _output_of_attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    start: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    return reference.empty_output(q)


def _output_of_paged_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pool: Tensor,
    block_table: Tensor,
    start: Tensor,
    page_dim: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    return reference.empty_output(q)

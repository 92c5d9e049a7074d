"""`quire::attend` and `quire::paged_attend`: schemas, shapes for export, and the implementation of each device.

`load_ops()` registers everything; importing this module registers nothing. The schema is defined here, once, so that exported
programs and AOTInductor packages find the ops whichever implementation serves them; the compiled library only adds kernels.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from shared.kernels.attention import reference

NAMESPACE = "quire"
SCHEMAS = (
    "attend(Tensor q, Tensor k_cache, Tensor v_cache, Tensor start, float scale, int? window, float? softcap, Tensor? sinks) -> Tensor",
    "paged_attend(Tensor q, Tensor k, Tensor v, Tensor(a!) pool, Tensor block_table, Tensor start, int page_dim, float scale, "
    "int? window, float? softcap, Tensor? sinks) -> Tensor",
)

_lock = threading.Lock()
_libraries: list[torch.library.Library] = []  # registrations live as long as their Library object


def load_ops() -> None:
    """Define the ops and register what can run them on this host. Idempotent and thread-safe."""
    with _lock:
        if _libraries:
            return
        library = torch.library.Library(NAMESPACE, "FRAGMENT")
        for schema in SCHEMAS:
            library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.register_fake(f"{NAMESPACE}::attend", _output_of_attend, lib=library)
        torch.library.register_fake(f"{NAMESPACE}::paged_attend", _output_of_paged_attend, lib=library)
        library.impl("attend", reference.attend, "CPU")
        library.impl("paged_attend", reference.paged_attend, "CPU")
        _libraries.append(library)


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

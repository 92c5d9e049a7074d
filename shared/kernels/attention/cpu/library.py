"""The compiled CPU kernels of the attention ops."""

from __future__ import annotations

from pathlib import Path

from shared.kernels.build import load_library, vector_macros

_FOLDER = Path(__file__).parent
_SOURCES = (_FOLDER / "ops.cpp",)
_HEADERS = tuple(_FOLDER / name for name in ("cells.h", "decode.h", "prefill.h", "vec.h"))


def load_kernels() -> Path | None:
    """Register the kernels with torch's dispatcher, compiled on a machine's first use (about half a minute); the library's path.

    None, with the reason logged, where this host cannot build them; BuildFailed when its compiler rejects them.
    """
    return load_library("attention", _SOURCES, vector_macros(), _HEADERS)

"""Digest of our own source code, for keys of what that code makes: a change of the code is then a change of the key."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_SUFFIXES = frozenset({".py", ".cpp", ".h"})


def code_digest(places: Sequence[str]) -> str:
    """sha256 in hex over names and contents of the source files in `places`: files and folders, relative to the repository root.

    ValueError for a place that holds none.
    """
    total = hashlib.sha256()
    for place in places:
        found = _ROOT / place
        files = [found] if found.is_file() else sorted(path for path in found.rglob("*") if path.suffix in _SUFFIXES)
        if not files:
            raise ValueError(f"no source files in {found}")
        for path in files:
            total.update(f"{path.relative_to(_ROOT)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()

"""Where this user keeps what Quire derives and may make again: compiled kernels, fetched models."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """`$QUIRE_CACHE`, else `~/.cache/quire`."""
    return Path(os.environ.get("QUIRE_CACHE") or "~/.cache/quire").expanduser()

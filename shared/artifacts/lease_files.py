"""Leases as files: one a handle, below a folder named after the artifact; the time of modification is the last heartbeat."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from shared.artifacts.lease import LEASE_TTL_S, Lease
from shared.ids import new_id


class LeaseFiles:
    """Leases below `root`. OSError where the medium fails."""

    def __init__(self, root: Path, clock: Callable[[], float]) -> None:
        self._root, self._clock = root, clock

    def take(self, name: str) -> Lease:
        path = self._root / name / new_id()

        def renew() -> None:
            path.parent.mkdir(exist_ok=True)
            path.touch()
            os.utime(path, (self._clock(),) * 2)

        renew()
        return Lease(renew, lambda: path.unlink(missing_ok=True))

    def is_held(self, name: str) -> bool:
        return any(not self._is_lapsed(path) for path in (self._root / name).glob("*"))

    def drop_lapsed(self) -> None:
        """Remove what protects nothing. Not while another process takes a lease: it makes a folder first, then the file."""
        for path in self._root.glob("*/*"):
            if self._is_lapsed(path):
                path.unlink(missing_ok=True)
        for folder in self._root.iterdir():
            if not any(folder.iterdir()):
                folder.rmdir()

    def _is_lapsed(self, path: Path) -> bool:
        try:
            return path.stat().st_mtime + LEASE_TTL_S < self._clock()
        except FileNotFoundError:
            return True

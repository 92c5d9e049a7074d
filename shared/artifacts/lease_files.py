"""Leases as files: one a handle, below a folder named after the artifact; the time of modification is the last heartbeat.

The holder's process has its file locked as well, and the kernel gives the lock up with it. So a lease of a process that lives is
held, however long its heartbeat is late: a suspended host, a clock that is set forward, a build that lets no thread run. What is
not locked, for its holder is dead or its file system locks nothing, lapses by its age.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
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
        descriptor = os.open(path, os.O_WRONLY)
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

        def release() -> None:
            os.close(descriptor)
            path.unlink(missing_ok=True)

        return Lease(renew, release)

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
            return path.stat().st_mtime + LEASE_TTL_S < self._clock() and not _is_locked(path)
        except FileNotFoundError:
            return True


def _is_locked(path: Path) -> bool:
    descriptor = os.open(path, os.O_WRONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # nothing can be locked here
        return False
    finally:
        os.close(descriptor)
    return False

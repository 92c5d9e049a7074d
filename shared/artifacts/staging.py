"""Directories that are being written, each locked by its writer: the kernel gives the lock up with the process, however that ends.

So a build that was killed is known to be dead at once, whatever the clocks say, and one that is alive is left alone for as long as
it takes. Where a file system does not lock directories, what nothing was written to for a day is taken for dead.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from shared.ids import new_id

STALE_STAGING_S = 24 * 3600.0
"""What nothing was written to for this long, and cannot be asked, belongs to a dead writer."""


class StagedDirectory:
    """An empty directory, its writer's until `end()`."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def end(self) -> None:
        """Remove what is left of it; what has been published has another name by now."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)


class Staging:
    """Below `root`. With the store's lock held, or a directory could be seen before its writer has locked it."""

    def __init__(self, root: Path, clock: Callable[[], float]) -> None:
        self.root, self._clock = root, clock

    def begin(self) -> StagedDirectory:
        return StagedDirectory(self.root / new_id())

    def abandoned(self) -> list[Path]:
        """Those whose writers are dead."""
        return [path for path in self.root.iterdir() if self._is_abandoned(path)]

    def _is_abandoned(self, path: Path) -> bool:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except (FileNotFoundError, NotADirectoryError):  # its writer has ended it, or it is none of ours
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return self._is_stale(path)
        finally:
            os.close(descriptor)
        return path.exists()  # or its writer has just ended it

    def _is_stale(self, path: Path) -> bool:
        try:
            newest_s = max(part.lstat().st_mtime for part in (path, *path.rglob("*")))
        except FileNotFoundError:  # its writer is at work
            return False
        return newest_s + STALE_STAGING_S < self._clock()

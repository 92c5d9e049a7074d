"""Files of an artifact on a disk: describe, compare with a manifest, make durable."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from shared.artifacts.record import MANIFEST_NAME, SIGNATURE_NAME, check_file_name
from shared.errors import ArtifactCorrupt
from shared.manifest import FileEntry


def describe_files(directory: Path) -> tuple[FileEntry, ...]:
    """Entries of every file under `directory`, by path: what a manifest lists. ArtifactCorrupt for links and odd names."""
    names = sorted(check_file_name(name) for name in _walk(directory))
    return tuple(FileEntry(path=name, sha256=sha256_of(directory / name), size=(directory / name).stat().st_size) for name in names)


def check_files(directory: Path, files: Iterable[FileEntry]) -> None:
    """Compare every byte under `directory` with `files`.

    ArtifactCorrupt for the first of: a link or special file, a file missing, a file too many, another size, another digest.
    The store's own files are left out of the comparison.
    """
    entries = {entry.path: entry for entry in files}
    present = set(_walk(directory)) - {MANIFEST_NAME, SIGNATURE_NAME}
    for name in sorted(entries.keys() - present):
        raise _mismatch(name, f"{entries[name].size} bytes", "no such file")
    for name in sorted(present - entries.keys()):
        raise _mismatch(name, "no such file", "a file the manifest does not list")
    for name, entry in entries.items():
        size = (directory / name).stat().st_size
        if size != entry.size:
            raise _mismatch(name, f"{entry.size} bytes", f"{size} bytes")
    for name, entry in entries.items():
        digest = sha256_of(directory / name)
        if digest != entry.sha256:
            raise _mismatch(name, f"sha256 {entry.sha256}", f"sha256 {digest}")


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_durable(directory: Path) -> None:
    """fsync every file and folder under `directory` and itself, contents before the names that lead to them."""
    for folder, _, names in os.walk(directory, topdown=False):
        for name in names:
            fsync(Path(folder, name))
        fsync(Path(folder))


def fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def tree_bytes(directory: Path) -> int:
    """Bytes of the regular files under `directory`; what vanishes meanwhile counts as nothing."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += Path(folder, name).lstat().st_size
            except FileNotFoundError:
                continue
    return total


def _walk(directory: Path) -> Iterable[str]:
    """Relative POSIX names of the regular files; ArtifactCorrupt at the first link or special file."""
    for folder, folders, names in os.walk(directory):
        for name in folders + names:
            path = Path(folder, name)
            relative = path.relative_to(directory).as_posix()
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode):
                yield relative
            elif not stat.S_ISDIR(mode):
                raise _mismatch(relative, "a regular file", "a link or special file")


def _mismatch(name: str, expected: str, got: str) -> ArtifactCorrupt:
    return ArtifactCorrupt(
        f"file {name}: expected {expected}, got {got}; the artifact was damaged after it was built, delete it and compile again",
        details={"file": name, "expected": expected, "got": got},
    )

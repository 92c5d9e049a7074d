"""Digest of a source's bytes, remembered by what the file system says of its files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from shared.errors import SourceInvalid
from shared.small_file import replace_file

_BLOCK_BYTES = 1 << 22
_REMEMBERED = 512


def fingerprint(files: Sequence[Path]) -> str:
    """A text that changes when a file is replaced, touched or rewritten: path, size, mtime, ctime and inode of each. Reads no
    content. SourceInvalid for a file that is gone, or cannot be asked.

    Nobody can set the time of change: weights of the same size written in place, with the old file's mtime put back, show by it.
    Equal on all hosts that mount one volume at the same path, so that their compilers know each other's sources.
    """
    with _readable():
        stats = [(path, path.stat()) for path in files]
    return json.dumps([[str(path), s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino] for path, s in stats])


def hash_files(files: Sequence[Path]) -> str:
    """sha256 in hex over name, size and content of every file, in the given order. SourceInvalid for one that cannot be read."""
    total = hashlib.sha256()
    for path in files:
        content = hashlib.sha256()
        with _readable(), path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                content.update(block)
        total.update(json.dumps([path.name, content.hexdigest()]).encode())
    return total.hexdigest()


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SourceInvalid(f"the source cannot be read: {error}; is it still being written?") from error


class DigestCache:
    """Remembers digests of unchanged files across processes, in one small JSON file. Losing it only costs time."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def digest(self, files: Sequence[Path]) -> str:
        """`hash_files(files)`, looked up by their fingerprint first. SourceInvalid if a file changes meanwhile."""
        before = fingerprint(files)
        known = self._load()
        if before in known:
            return known[before]
        digest = hash_files(files)
        check_unchanged(files, before)
        self._save({**known, before: digest})
        return digest

    def _load(self) -> dict[str, str]:
        try:
            known = json.loads(self._path.read_bytes())
        except (OSError, ValueError):
            return {}
        return known if isinstance(known, dict) else {}

    def _save(self, known: dict[str, str]) -> None:
        with suppress(OSError):  # a full or read-only disk: the next build reads the source once more
            replace_file(self._path, json.dumps(dict(list(known.items())[-_REMEMBERED:])).encode())


def check_unchanged(files: Sequence[Path], before: str) -> None:
    """SourceInvalid unless `fingerprint(files)` still is `before`."""
    if fingerprint(files) != before:
        raise SourceInvalid(f"{files[0].parent.name} changed while it was read; compile again once it is complete")

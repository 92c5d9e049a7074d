"""The few object-store verbs the artifact store needs, on an S3-compatible bucket through obstore.

StoreUnavailable for everything that goes wrong but an absent object and a lost race, which are answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

from shared.errors import StoreUnavailable

PIECE_BYTES = 64 << 20
"""Content is asked for in pieces of this size: obstore allows a request 30 s from its first byte to its last."""


@dataclass(frozen=True, slots=True)
class Item:
    """One object of a listing; `modified_s` is Unix time on the bucket's clock."""

    path: str
    size: int
    modified_s: float


class Bucket:
    """`store` is an obstore store; a prefix, if any, is part of it."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def get(self, path: str) -> bytes | None:
        with _translated():
            try:
                return bytes(obstore.get(self._store, path).bytes())
            except FileNotFoundError:
                return None

    def stream(self, path: str) -> Iterator[bytes] | None:
        """The content in pieces of up to 64 MiB; None if there is no such object. StoreUnavailable if it vanishes meanwhile."""
        with _translated():
            try:
                size: int = obstore.head(self._store, path)["size"]
            except FileNotFoundError:
                return None
        return self._pieces(path, size)

    def _pieces(self, path: str, size: int) -> Iterator[bytes]:
        for start in range(0, size, PIECE_BYTES):
            with _translated():
                piece = bytes(obstore.get_range(self._store, path, start=start, end=min(start + PIECE_BYTES, size)))
            yield piece

    def put(self, path: str, content: bytes | Path) -> None:
        """Whole or not at all; large files go in parts."""
        with _translated():
            size = content.stat().st_size if isinstance(content, Path) else len(content)
            obstore.put(self._store, path, content, chunk_size=part_bytes(size))

    def create(self, path: str, content: bytes) -> bool:
        """Put only if there is no such object; False if there is one."""
        return self._put_if(path, content, "create")

    def replace(self, path: str, content: bytes, tag: str) -> bool:
        """Put only over the version `tag` names; False if it is another by now."""
        return self._put_if(path, content, {"e_tag": tag})

    def _put_if(self, path: str, content: bytes, mode: str | dict[str, str]) -> bool:
        with _translated():
            try:
                obstore.put(self._store, path, content, mode=mode)
            except (AlreadyExistsError, PreconditionError, FileNotFoundError):
                return False
        return True

    def tag(self, path: str) -> str | None:
        """What names the present version of an object; None if there is none."""
        with _translated():
            try:
                tag: str = obstore.head(self._store, path)["e_tag"]
            except FileNotFoundError:
                return None
        return tag

    def items(self, prefix: str | None = None) -> list[Item]:
        """Every object below a prefix (whole path parts), or all."""
        with _translated():
            return [
                Item(path=found["path"], size=found["size"], modified_s=found["last_modified"].timestamp())
                for batch in obstore.list(self._store, prefix)
                for found in batch
            ]

    def delete(self, paths: Sequence[str]) -> None:
        """Those that exist."""
        if paths:
            with _translated():
                obstore.delete(self._store, list(paths))


def part_bytes(size: int) -> int:
    """Parts in which `size` bytes are uploaded: 5 MiB, or what makes them 10,000, the most that S3 takes."""
    return max(5 << 20, -(-size // 10_000))


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (BaseError, OSError) as error:
        summary = str(error).partition("\n")[0]
        raise StoreUnavailable(f"the artifact store's bucket failed: {summary}") from error

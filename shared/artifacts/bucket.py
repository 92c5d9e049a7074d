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

_CHUNK_BYTES = 8 << 20


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
        """The content in chunks of some megabytes; None if there is no such object."""
        with _translated():
            try:
                chunks = obstore.get(self._store, path).stream(min_chunk_size=_CHUNK_BYTES)
            except FileNotFoundError:
                return None
        return _translated_each(chunks)

    def put(self, path: str, content: bytes | Path) -> None:
        """Whole or not at all; large files go in parts."""
        with _translated():
            obstore.put(self._store, path, content)

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


def _translated_each(chunks: Any) -> Iterator[bytes]:
    with _translated():
        for chunk in chunks:
            yield bytes(chunk)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (BaseError, OSError) as error:
        summary = str(error).partition("\n")[0]
        raise StoreUnavailable(f"the artifact store's bucket failed: {summary}") from error

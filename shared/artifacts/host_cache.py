"""One host's verified copies of artifacts that live in a bucket, in a local store that several processes fill at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import structlog

from shared.artifacts.local import LocalStore
from shared.artifacts.record import ManifestHead
from shared.artifacts.store import ArtifactHandle
from shared.errors import ArtifactCorrupt, ArtifactNotFound, StoreUnavailable
from shared.manifest import FileEntry

_ATTEMPTS = 4

_log = structlog.get_logger(__name__)

Content = Callable[[FileEntry], Iterator[bytes]]
"""Reads one file of an artifact from the bucket, in chunks."""


class HostCache:
    """Copies in `store`, at most `max_bytes` of them beside those that are open."""

    def __init__(self, store: LocalStore, max_bytes: int) -> None:
        self.store, self._max_bytes = store, max_bytes

    def open(self, manifest: bytes, head: ManifestHead, content: Content) -> ArtifactHandle:
        """A verified copy of exactly this manifest; a damaged copy, or one of another manifest, is made anew.

        Other processes of this host may publish, or collect, what this one is about to.
        """
        for _ in range(_ATTEMPTS):
            try:
                handle = self.store.open(head.artifact_id)
            except (ArtifactNotFound, ArtifactCorrupt) as error:
                _log.info("artifact fetched", artifact_id=head.artifact_id, cause=error.reason)
                self._fetch(manifest, head, content)
                continue
            if handle.manifest_bytes == manifest:
                return handle
            handle.close()
            self.store.discard(head.artifact_id)
        raise StoreUnavailable(
            f"the artifact cache lost {head.artifact_id} {_ATTEMPTS} times while it was opened; is it too small?"
        )

    def _fetch(self, manifest: bytes, head: ManifestHead, content: Content) -> None:
        """Make room, then copy the artifact into the cache, in place of a damaged copy."""
        self.store.gc(max_bytes=max(0, self._max_bytes - head.size_bytes))
        with self.store.stage() as staged:
            for entry in head.files:
                _write(staged / entry.path, content(entry))
            self.store.publish(head.artifact_id, staged, manifest)


def _write(target: Path, chunks: Iterator[bytes]) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
    except OSError as error:
        raise StoreUnavailable(f"the artifact cache failed: {error}") from error

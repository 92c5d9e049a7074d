"""The artifact store in an S3-compatible bucket, shared by any number of hosts; a local store serves as each host's cache.

    <id>/files/<place>/<sha256>    content, in a place of each publication's own: writers, and removals, never meet
    <id>/manifest.json             put last and only if absent: makes the artifact visible; names the place
    <id>/manifest.sig
    <id>/used                      Unix time of the latest open
    <id>/leases/<name>, removal    see bucket_leases.py

Opening copies the files into the cache and verifies the copy; a cached artifact is verified again and compared with the bucket's
manifest. The bucket must support conditional puts (`If-None-Match`, `If-Match`), as S3 does.
"""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from functools import partial
from pathlib import Path

import structlog

from shared.artifacts.bucket import Bucket, Item
from shared.artifacts.bucket_leases import BucketLeases, is_lease, read_time, removal_path, time_bytes
from shared.artifacts.collection import choose_removals
from shared.artifacts.files import check_files
from shared.artifacts.host_cache import HostCache
from shared.artifacts.placement import Placed, goes_with
from shared.artifacts.record import MANIFEST_NAME, SIGNATURE_NAME, is_artifact_id
from shared.artifacts.staging import STALE_STAGING_S
from shared.artifacts.store import UNREADABLE, ArtifactHandle, ArtifactInfo, GCReport, ManifestVerifier, check_unused, not_found
from shared.errors import ArtifactCorrupt, ArtifactNotFound, InUse, StoreUnavailable
from shared.ids import ArtifactId, check_artifact_id
from shared.manifest import FileEntry

_log = structlog.get_logger(__name__)


class ObjectStore:
    """ArtifactStore in `bucket`. `cache` is this host's, without a verifier of its own; `verifier` as in LocalStore."""

    def __init__(
        self,
        bucket: Bucket,
        cache: HostCache,
        *,
        verifier: ManifestVerifier | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._bucket, self._cache, self._verifier, self._clock = bucket, cache, verifier, clock
        self._leases = BucketLeases(bucket, clock)

    def stage(self) -> AbstractContextManager[Path]:
        return self._cache.store.stage()

    def publish(self, artifact_id: str, staged: Path, manifest: bytes) -> bool:
        path = _manifest_path(artifact_id)
        placed = Placed.anew(manifest, artifact_id)
        check_files(staged, placed.head.files)
        tag = self._bucket.tag(path)
        if tag is not None:
            try:
                if not self._is_damaged(artifact_id):
                    return False
            except ArtifactNotFound:  # removed meanwhile
                tag = None
        for entry in placed.head.files:
            self._bucket.put(placed.path(entry), staged / entry.path)
        # A writer that loses here leaves content nobody names; a later collection removes it.
        return self._bucket.create(path, placed.stored) if tag is None else self._bucket.replace(path, placed.stored, tag)

    def open(self, artifact_id: str) -> ArtifactHandle:
        check_artifact_id(artifact_id)
        with ExitStack() as undo:
            undo.callback(self._leases.take(artifact_id).close)
            placed = self._trusted(artifact_id)
            cached = self._cache.open(placed.manifest, placed.head, partial(self._content, placed))
            undo.callback(cached.close)
            self._bucket.put(f"{artifact_id}/used", time_bytes(self._clock()))
            return ArtifactHandle(placed.artifact_id, placed.manifest, cached.paths, undo.pop_all().close)

    def verify(self, artifact_id: str) -> None:
        with closing(self._leases.take(check_artifact_id(artifact_id))):
            self._check_files(self._trusted(artifact_id))

    def manifest(self, artifact_id: str) -> bytes:
        return self._read(artifact_id).manifest

    def contains(self, artifact_id: str) -> bool:
        return self._bucket.tag(_manifest_path(artifact_id)) is not None

    def list(self, kind: str | None = None) -> tuple[ArtifactInfo, ...]:
        infos = [info for artifact_id, items in self._items().items() if (info := self._info(artifact_id, items))]
        infos.sort(key=lambda info: (info.published_s, info.artifact_id))
        return tuple(info for info in infos if kind is None or info.kind == kind)

    def add_signature(self, artifact_id: str, signature: bytes) -> None:
        self.manifest(artifact_id)
        self._bucket.put(f"{artifact_id}/{SIGNATURE_NAME}", signature)

    def delete(self, artifact_id: str) -> None:
        checked = check_artifact_id(artifact_id)
        if not self.contains(checked):
            raise not_found(checked)
        check_unused(checked, self.list())
        if not self._remove(checked, self._items(checked).get(checked, ())):
            raise InUse(f"artifact {checked} was opened, or is being removed, by a process meanwhile; unload it first")

    def gc(self, *, max_bytes: int | None = None, max_age_s: float | None = None) -> GCReport:
        chosen = choose_removals(self.list(), now_s=self._clock(), max_bytes=max_bytes, max_age_s=max_age_s)
        freed, left = 0, 0
        failed: set[ArtifactId] = set()
        for artifact_id, items in self._items().items():
            doomed = items if artifact_id in chosen else self._garbage(artifact_id, items)
            doomed_bytes, all_bytes = sum(item.size for item in doomed), sum(item.size for item in items)
            try:
                if artifact_id not in chosen:
                    self._bucket.delete([item.path for item in doomed])
                elif not self._remove(artifact_id, items):
                    failed.add(artifact_id)
                    left += all_bytes
                    continue
                freed, left = freed + doomed_bytes, left + all_bytes - doomed_bytes
            except StoreUnavailable as error:
                failed.add(artifact_id)
                left += all_bytes
                _log.warning("artifact not removed; the next collection tries again", artifact_id=artifact_id, error=error.message)
        removed = tuple(artifact_id for artifact_id in chosen if artifact_id not in failed)
        return GCReport(removed=removed, failed=tuple(sorted(failed)), freed_bytes=freed, left_bytes=left)

    # Reading

    def _read(self, artifact_id: str) -> Placed:
        stored = self._bucket.get(_manifest_path(artifact_id))
        if stored is None:
            raise not_found(artifact_id)
        return Placed.read(stored, artifact_id)

    def _trusted(self, artifact_id: str) -> Placed:
        placed = self._read(artifact_id)
        if self._verifier is not None:
            self._verifier(placed.manifest, self._bucket.get(f"{artifact_id}/{SIGNATURE_NAME}"))
        return placed

    def _content(self, placed: Placed, entry: FileEntry) -> Iterator[bytes]:
        chunks = self._bucket.stream(placed.path(entry))
        if chunks is None:
            if not self.contains(placed.artifact_id):  # deleted meanwhile
                raise not_found(placed.artifact_id)
            raise ArtifactCorrupt(
                f"file {entry.path} of artifact {placed.artifact_id} is missing from the bucket; compile again",
                details={"file": entry.path, "expected": f"{entry.size} bytes", "got": "no such file"},
            )
        return chunks

    def _check_files(self, placed: Placed) -> None:
        for entry in placed.head.files:
            digest = hashlib.sha256()
            for chunk in self._content(placed, entry):
                digest.update(chunk)
            if digest.hexdigest() != entry.sha256:
                raise ArtifactCorrupt(
                    f"file {entry.path}: expected sha256 {entry.sha256}, got {digest.hexdigest()}; compile again",
                    details={"file": entry.path, "expected": entry.sha256, "got": digest.hexdigest()},
                )

    def _is_damaged(self, artifact_id: str) -> bool:
        """ArtifactNotFound if it is removed before it is looked at; it is leased meanwhile."""
        try:
            with closing(self._leases.take(artifact_id)):
                self._check_files(self._read(artifact_id))
        except ArtifactCorrupt as error:
            _log.warning("a damaged artifact is replaced by the one being published", artifact_id=artifact_id, error=error.message)
            return True
        return False

    # Listing and removing

    def _items(self, prefix: str | None = None) -> Mapping[ArtifactId, Sequence[Item]]:
        """Every object, by artifact. What does not look like an artifact's is not ours."""
        found: dict[ArtifactId, list[Item]] = defaultdict(list)
        for item in self._bucket.items(prefix):
            name = item.path.partition("/")[0]
            if is_artifact_id(name):
                found[ArtifactId(name)].append(item)
        return found

    def _info(self, artifact_id: ArtifactId, items: Sequence[Item]) -> ArtifactInfo | None:
        """None for what is not published, or not any more."""
        published_s = next((item.modified_s for item in items if item.path == _manifest_path(artifact_id)), None)
        if published_s is None:
            return None
        try:
            head = self._read(artifact_id).head
            kind, model_id = head.kind, head.model_id
        except ArtifactNotFound:
            return None
        except ArtifactCorrupt:
            kind, model_id = UNREADABLE, None
        return ArtifactInfo(
            artifact_id=artifact_id,
            kind=kind,
            model_id=model_id,
            size_bytes=sum(item.size for item in items),
            published_s=published_s,
            last_used_s=max(published_s, read_time(self._bucket, f"{artifact_id}/used")),
            in_use=self._leases.any_holds(items),
        )

    def _garbage(self, artifact_id: ArtifactId, items: Sequence[Item]) -> Sequence[Item]:
        """Lapsed leases, and what belongs to no manifest and was not written lately."""
        try:
            placed = self._read(artifact_id)
            named = {placed.path(entry) for entry in placed.head.files}
            named |= {f"{artifact_id}/{name}" for name in (MANIFEST_NAME, SIGNATURE_NAME, "used")}
        except ArtifactNotFound:
            named = set()
        except ArtifactCorrupt:
            return ()  # it may name anything; delete() removes it whole
        stale_s = self._clock() - STALE_STAGING_S

        def is_garbage(item: Item) -> bool:
            if is_lease(item):
                return self._leases.is_lapsed(item.path)
            return item.path not in named and item.modified_s < stale_s

        return tuple(item for item in items if is_garbage(item))

    def _remove(self, artifact_id: ArtifactId, items: Sequence[Item]) -> bool:
        """The manifest first: from then on nobody begins to read the rest.

        A reader puts its lease before it reads the manifest, so one that came between the listing and now has a lease to be
        seen: the manifest is put back then, nothing else has gone, and the answer is False. It is False, too, while another removes
        the artifact: one could put back the manifest of content that the other is deleting. Content in another place than the
        manifest's may be a publication under way; if it is not, it is garbage in a day.
        """
        manifest = _manifest_path(artifact_id)
        with self._leases.removal(artifact_id) as is_alone:
            if not is_alone:
                return False
            stored = self._bucket.get(manifest)
            if stored is None:
                return True
            self._bucket.delete([manifest])
            if self._leases.is_held(artifact_id):
                self._bucket.create(manifest, stored)
                return False
            others = (manifest, removal_path(artifact_id))
            rest = [item.path for item in items if item.path not in others]
            self._bucket.delete([path for path in rest if goes_with(stored, path, artifact_id)])
            return True


def _manifest_path(artifact_id: str) -> str:
    return f"{check_artifact_id(artifact_id)}/{MANIFEST_NAME}"

"""The artifact store in a directory, safe for several processes of one or more hosts that share the file system.

<root>/<id[:2]>/<id>/{manifest.json, files...}   visible artifacts; a rename from staging makes one visible
<root>/staging/<name>/                           being written, locked by its writer
<root>/trash/<id>-<name>/                        no longer visible, its bytes not yet removed
<root>/leases/<id>/<name>                        one file a handle, locked by its holder; its mtime is the last heartbeat
<root>/.lock                                     flock: becoming visible, leasing and becoming invisible exclude each other
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import structlog

from shared.artifacts.collection import choose_removals
from shared.artifacts.files import check_files, fsync, make_durable, tree_bytes
from shared.artifacts.lease import Lease
from shared.artifacts.lease_files import LeaseFiles
from shared.artifacts.record import MANIFEST_NAME, SIGNATURE_NAME, ManifestHead, is_artifact_id, read_head, seal, unseal
from shared.artifacts.staging import Staging
from shared.artifacts.store import UNREADABLE, ArtifactHandle, ArtifactInfo, GCReport, ManifestVerifier, check_unused, not_found
from shared.errors import ArtifactCorrupt, ArtifactNotFound, StoreUnavailable
from shared.ids import ArtifactId, check_artifact_id, new_id

_log = structlog.get_logger(__name__)


class LocalStore:
    """ArtifactStore in `root`, which is created. `verifier` sees every manifest and its signature before an open succeeds."""

    def __init__(self, root: Path, *, verifier: ManifestVerifier | None = None, clock: Callable[[], float] = time.time) -> None:
        self._root, self._verifier, self._clock = root.resolve(), verifier, clock
        self._staging, self._trash = Staging(self._root / "staging", clock), self._root / "trash"
        self._leases = LeaseFiles(self._root / "leases", clock)
        with self._disk():
            for directory in (self._staging.root, self._trash, self._root / "leases"):
                directory.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def stage(self) -> Iterator[Path]:
        with self._disk():
            with self._locked():
                abandoned = self._staging.abandoned()  # a killed build's weights are large, and its next attempt wants their room
                for directory in abandoned:
                    self._hide(directory)
                staged = self._staging.begin()
            if abandoned:
                self._empty_trash()
        try:
            yield staged.path
        finally:
            staged.end()

    def publish(self, artifact_id: str, staged: Path, manifest: bytes) -> bool:
        if staged.resolve().parent != self._staging.root:
            raise ValueError(f"only a directory made by stage() of this store can be published; got {staged}")
        final = self._directory(artifact_id)
        head = read_head(manifest, artifact_id=artifact_id)
        with self._disk():
            check_files(staged, head.files)
            damaged = self._was_damaged(artifact_id)
            sealed = staged / MANIFEST_NAME
            sealed.write_bytes(seal(manifest))
            os.utime(sealed, (self._clock(),) * 2)
            make_durable(staged)
            with self._locked():
                if final.exists():
                    # Seen to be damaged, it is looked at again: another writer may have put a whole one in its place since.
                    if not (damaged and self._is_damaged(artifact_id)):
                        return False
                    self._hide(final)
                final.parent.mkdir(exist_ok=True)
                staged.rename(final)
                fsync(final.parent)
                fsync(self._root)
                self._mark_used(final)
        return True

    def open(self, artifact_id: str) -> ArtifactHandle:
        directory = self._directory(artifact_id)
        with self._disk():
            lease, manifest, head = self._hold(directory)
            try:
                self._mark_used(directory)
            except BaseException:
                lease.close()
                raise
        paths = {entry.path: directory / entry.path for entry in head.files}
        return ArtifactHandle(head.artifact_id, manifest, paths, lease.close)

    def verify(self, artifact_id: str) -> None:
        with self._disk():
            self._hold(self._directory(artifact_id))[0].close()

    def manifest(self, artifact_id: str) -> bytes:
        with self._disk():
            return self._read_manifest(self._directory(artifact_id))[0]

    def contains(self, artifact_id: str) -> bool:
        with self._disk():
            return (self._directory(artifact_id) / MANIFEST_NAME).is_file()

    def list(self, kind: str | None = None) -> tuple[ArtifactInfo, ...]:
        with self._disk():
            infos = [info for directory in self._visible() if (info := self._info(directory))]
        infos.sort(key=lambda info: (info.published_s, info.artifact_id))
        return tuple(info for info in infos if kind is None or info.kind == kind)

    def add_signature(self, artifact_id: str, signature: bytes) -> None:
        directory = self._directory(artifact_id)
        with self._disk(), self.stage() as staged, self._locked():
            self._read_manifest(directory)
            (staged / SIGNATURE_NAME).write_bytes(signature)
            make_durable(staged)
            (staged / SIGNATURE_NAME).replace(directory / SIGNATURE_NAME)
            fsync(directory)

    def delete(self, artifact_id: str) -> None:
        directory = self._directory(artifact_id)
        with self._disk():
            with self._locked():
                if not directory.exists():
                    raise not_found(artifact_id)
                check_unused(artifact_id, self.list())
                self._hide(directory)
            self._empty_trash()

    def discard(self, artifact_id: str) -> None:
        """Remove what is there, even if it is open or needed: for a store that is only a cache of another."""
        directory = self._directory(artifact_id)
        with self._disk():
            with self._locked():
                if directory.exists():
                    self._hide(directory)
            self._empty_trash()

    def gc(self, *, max_bytes: int | None = None, max_age_s: float | None = None) -> GCReport:
        with self._disk():
            before = tree_bytes(self._root)
            with self._locked():
                self._leases.drop_lapsed()
                chosen = choose_removals(self.list(), now_s=self._clock(), max_bytes=max_bytes, max_age_s=max_age_s)
                for artifact_id in chosen:
                    self._hide(self._directory(artifact_id))
                for directory in self._leftovers():
                    self._hide(directory)
            failed = self._empty_trash()
            left = tree_bytes(self._root)
        removed = tuple(artifact_id for artifact_id in chosen if artifact_id not in failed)
        return GCReport(removed=removed, failed=tuple(sorted(failed)), freed_bytes=before - left, left_bytes=left)

    # Paths, locks and errors

    def _directory(self, artifact_id: str) -> Path:
        checked = check_artifact_id(artifact_id)
        return self._root / checked[:2] / checked

    @contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreUnavailable(f"the artifact store in {self._root} failed: {error}") from error

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclusive among all threads and processes: every entry opens its own description of the lock file."""
        with (self._root / ".lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    # Reading

    def _read_manifest(self, directory: Path) -> tuple[bytes, ManifestHead]:
        path = directory / MANIFEST_NAME
        for link in (directory.parent, directory, path):
            if link.is_symlink():
                raise ArtifactCorrupt(f"{link} is a link; artifacts hold regular files only", details={"file": link.name})
        try:
            manifest = unseal(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            raise not_found(directory.name) from None
        return manifest, read_head(manifest, artifact_id=directory.name)

    def _hold(self, directory: Path) -> tuple[Lease, bytes, ManifestHead]:
        """Lease, then check every byte; no lease is left where the check fails."""
        lease = self._lease(directory)
        try:
            manifest, head = self._read_manifest(directory)
            if self._verifier is not None:
                signature = directory / SIGNATURE_NAME
                self._verifier(manifest, signature.read_bytes() if signature.is_file() else None)
            check_files(directory, head.files)
        except BaseException:
            lease.close()
            raise
        return lease, manifest, head

    def _lease(self, directory: Path) -> Lease:
        with self._locked():  # from here on no collection can choose it
            if not directory.exists():
                raise not_found(directory.name)
            return self._leases.take(directory.name)

    def _mark_used(self, directory: Path) -> None:
        os.utime(directory, (self._clock(),) * 2)

    def _was_damaged(self, artifact_id: str) -> bool:
        """Whether what is there is damaged; leased, or it could be removed while it is looked at."""
        try:
            lease = self._lease(self._directory(artifact_id))
        except ArtifactNotFound:
            return False
        with closing(lease):
            return self._is_damaged(artifact_id)

    def _is_damaged(self, artifact_id: str) -> bool:
        directory = self._directory(artifact_id)
        try:
            check_files(directory, self._read_manifest(directory)[1].files)
        except ArtifactNotFound:
            return directory.exists()
        except ArtifactCorrupt as error:
            _log.warning("a damaged artifact is replaced by the one being published", artifact_id=artifact_id, error=str(error))
            return True
        return False

    def _visible(self) -> Iterator[Path]:
        return (path for path in self._root.glob("[0-9a-f][0-9a-f]/*") if is_artifact_id(path.name))

    def _info(self, directory: Path) -> ArtifactInfo | None:
        """None for what has no manifest or vanished while listing."""
        try:
            head = self._read_manifest(directory)[1]
            artifact_id, kind, model_id = head.artifact_id, head.kind, head.model_id
        except ArtifactNotFound:
            return None
        except ArtifactCorrupt:
            artifact_id, kind, model_id = ArtifactId(directory.name), UNREADABLE, None
        try:
            published_s, touched_s = (directory / MANIFEST_NAME).stat().st_mtime, directory.stat().st_mtime
        except FileNotFoundError:
            return None
        return ArtifactInfo(
            artifact_id=artifact_id,
            kind=kind,
            model_id=model_id,
            size_bytes=tree_bytes(directory),
            published_s=published_s,
            last_used_s=max(published_s, touched_s),
            in_use=self._leases.is_held(directory.name),
        )

    # Removing

    def _leftovers(self) -> Sequence[Path]:
        """What dead writers and interrupted hands left: staging directories, artifacts without a manifest."""
        return self._staging.abandoned() + [path for path in self._visible() if not (path / MANIFEST_NAME).exists()]

    def _hide(self, directory: Path) -> None:
        directory.rename(self._trash / f"{directory.name}-{new_id()}")

    def _empty_trash(self) -> set[ArtifactId]:
        """Remove what can be removed; ids of which bytes are left, for the next collection to try again."""
        failed: set[ArtifactId] = set()
        for directory in self._trash.iterdir():
            try:
                shutil.rmtree(directory)
            except FileNotFoundError:  # another process empties it too
                continue
            except OSError as error:
                if is_artifact_id(name := directory.name.partition("-")[0]):
                    failed.add(ArtifactId(name))
                _log.warning("artifact bytes not removed; the next collection tries again", path=str(directory), error=str(error))
        return failed

"""The contract of an artifact store: whole artifacts, published once, checked on every read.

Life of an artifact: a writer fills a directory from `stage()` and publishes it under its id together with a manifest that names
every file with its size and sha256. From then on it is visible, whole and immutable; nothing of it is visible before. A reader
opens it: every byte is compared with the manifest first, and a lease keeps garbage collection away until the handle is closed.

Two writers of one id end with one whole artifact, the first one's. Ids and file names are validated, resolved and confined to
the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Protocol

from shared.errors import ArtifactNotFound, InUse
from shared.ids import ArtifactId

UNREADABLE = "unreadable"
"""Kind of a listed artifact whose manifest is damaged: it cannot be opened, only deleted."""

ManifestVerifier = Callable[[bytes, bytes | None], None]
"""Takes a manifest and its signature, if it has one; raises ArtifactUntrusted unless it is to be trusted."""


@dataclass(frozen=True, slots=True)
class ArtifactInfo:
    """One line of a listing. `last_used_s`: Unix time of publication or of the latest open, whichever is later."""

    artifact_id: ArtifactId
    kind: str
    model_id: ArtifactId | None
    size_bytes: int
    published_s: float
    last_used_s: float
    in_use: bool


@dataclass(frozen=True, slots=True)
class GCReport:
    """What a collection removed and what it leaves. `failed`: chosen, but opened meanwhile or not removed to the last byte."""

    removed: tuple[ArtifactId, ...]
    failed: tuple[ArtifactId, ...]
    freed_bytes: int
    left_bytes: int


class ArtifactHandle:
    """A verified artifact, held against garbage collection until `close()`. Use it as a context manager.

    `paths`: local path of every file by its name in the manifest.
    """

    def __init__(
        self, artifact_id: ArtifactId, manifest_bytes: bytes, paths: Mapping[str, Path], release: Callable[[], None]
    ) -> None:
        self.artifact_id, self.manifest_bytes = artifact_id, manifest_bytes
        self.paths = MappingProxyType(dict(paths))
        self._release = release

    def path(self, name: str) -> Path:
        """Local path of a file of the manifest; ArtifactNotFound for any other name."""
        if name not in self.paths:
            raise ArtifactNotFound(f"artifact {self.artifact_id} has no file {name[:80]!r}; it has {sorted(self.paths)}")
        return self.paths[name]

    def close(self) -> None:
        """Give the lease up. Idempotent."""
        self._release()

    def __enter__(self) -> ArtifactHandle:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class ArtifactStore(Protocol):
    """All methods block on disk or network. FieldOutOfRange for a malformed id, StoreUnavailable where the medium fails."""

    def stage(self) -> AbstractContextManager[Path]:
        """An empty directory for the files of one artifact, gone when the context ends. A child process may fill it."""
        ...

    def publish(self, artifact_id: str, staged: Path, manifest: bytes) -> bool:
        """Make the files under `staged` (a directory of `stage()`, consumed) visible at once under `artifact_id`.

        True if this call published; False if a whole artifact of that id was there already, which then stays as it is. A damaged
        one is replaced. ArtifactCorrupt if the manifest and the staged files disagree; nothing is published then.
        """
        ...

    def open(self, artifact_id: str) -> ArtifactHandle:
        """Lease and verify every byte. ArtifactNotFound, ArtifactCorrupt, or ArtifactUntrusted where a signature is required."""
        ...

    def verify(self, artifact_id: str) -> None:
        """Everything `open` checks, without keeping a handle."""
        ...

    def manifest(self, artifact_id: str) -> bytes:
        """The manifest as published, its seal checked but not the files. ArtifactNotFound, ArtifactCorrupt."""
        ...

    def contains(self, artifact_id: str) -> bool:
        """Whether the artifact is visible. Says nothing about its bytes."""
        ...

    def list(self, kind: str | None = None) -> tuple[ArtifactInfo, ...]:
        """Every visible artifact, or those of one kind, oldest publication first."""
        ...

    def add_signature(self, artifact_id: str, signature: bytes) -> None:
        """Store a signature over the manifest beside it, in place of an earlier one. ArtifactNotFound, ArtifactCorrupt."""
        ...

    def delete(self, artifact_id: str) -> None:
        """ArtifactNotFound; InUse where a handle is open or a stored engine needs this model."""
        ...

    def gc(self, *, max_bytes: int | None = None, max_age_s: float | None = None) -> GCReport:
        """Remove artifacts unused for `max_age_s`, then the least recently used until `max_bytes` hold.

        What is in use, or needed by an engine that stays, is never removed, even if a limit is then missed. Bytes left behind by
        crashed writers and by earlier failed removals go as well.
        """
        ...


def not_found(artifact_id: str) -> ArtifactNotFound:
    return ArtifactNotFound(f"no artifact {artifact_id} in this store; compile it or point --store at the store that has it")


def check_unused(artifact_id: str, infos: Iterable[ArtifactInfo]) -> None:
    """InUse if `artifact_id` is open somewhere or is the model of a stored engine."""
    for info in infos:
        if info.artifact_id == artifact_id and info.in_use:
            raise InUse(f"artifact {artifact_id} is open in a process; unload it first")
        if info.model_id == artifact_id:
            raise InUse(f"model {artifact_id} is needed by engine {info.artifact_id}; delete that first")

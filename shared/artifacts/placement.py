"""A manifest as a bucket holds it: sealed, and with it, sealed as well, the place of the content it names.

    manifest.json    lines 1, 2: the manifest and its seal, as record.py has them
                     lines 3, 4: the place, 32 hexadecimal digits, and its seal

Every publication puts its content in a place of its own. So a removal that is still at work, its manifest gone and its content
listed, takes nothing that a later publication of the same id has put.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shared.artifacts.record import MANIFEST_NAME, ManifestHead, read_head, seal, unseal
from shared.errors import ArtifactCorrupt
from shared.ids import ArtifactId, new_id
from shared.manifest import FileEntry

_PLACE = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Placed:
    """One publication of an artifact."""

    manifest: bytes
    head: ManifestHead
    place: str

    @classmethod
    def anew(cls, manifest: bytes, artifact_id: str) -> Placed:
        """In a place of its own. ArtifactCorrupt for another's manifest."""
        return cls(manifest, read_head(manifest, artifact_id=artifact_id), new_id())

    @classmethod
    def read(cls, stored: bytes, artifact_id: str) -> Placed:
        """As `stored`; ArtifactCorrupt where a byte of it changed, or it is another's."""
        sealed, placed = _halves(stored)
        manifest, place = unseal(sealed), unseal(placed).decode(errors="replace")
        head = read_head(manifest, artifact_id=artifact_id)
        if not _PLACE.fullmatch(place):
            raise ArtifactCorrupt(
                f"the manifest of {artifact_id} names no place of its content; delete it and compile again",
                details={"file": MANIFEST_NAME, "expected": "32 hexadecimal digits", "got": place[:80]},
            )
        return cls(manifest, head, place)

    @property
    def artifact_id(self) -> ArtifactId:
        return self.head.artifact_id

    @property
    def stored(self) -> bytes:
        return seal(self.manifest) + seal(self.place.encode())

    def path(self, entry: FileEntry) -> str:
        """Where the content of a file lies. Named by its digest as well: files of the same bytes are stored once."""
        return f"{self.artifact_id}/files/{self.place}/{entry.sha256}"


def goes_with(stored: bytes, path: str, artifact_id: str) -> bool:
    """Whether an object of the artifact is removed with its manifest: all but content of another place. With a manifest that
    nobody can read, everything."""
    files = f"{artifact_id}/files/"
    try:
        return not path.startswith(files) or path.startswith(f"{files}{Placed.read(stored, artifact_id).place}/")
    except ArtifactCorrupt:
        return True


def _halves(stored: bytes) -> tuple[bytes, bytes]:
    lines = stored.splitlines(keepends=True)
    return b"".join(lines[:2]), b"".join(lines[2:])

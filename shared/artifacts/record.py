"""What a store keeps besides an artifact's files: the manifest, sealed with its own digest, and what a store reads in it.

    manifest.json    line 1: the manifest, canonical JSON, byte for byte as published
                     line 2: its sha256, as a JSON string

The artifact id names what went *into* a build, so it cannot vouch for the bytes that came out. The manifest vouches for the
files and the seal for the manifest: a flipped byte anywhere is found without a key. Against somebody who rewrites both there
is the signature (shared/artifacts/signing.py).
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

from shared.errors import ArtifactCorrupt
from shared.ids import ArtifactId, is_digest
from shared.manifest import FileEntry

MANIFEST_NAME = "manifest.json"
SIGNATURE_NAME = "manifest.sig"

_PART = re.compile(r"[A-Za-z0-9._-]+")
_MAX_NAME_CHARS = 255


@dataclass(frozen=True, slots=True)
class ManifestHead:
    """The fields of a manifest that every kind has. `model_id` is the artifact an engine cannot be loaded without."""

    artifact_id: ArtifactId
    kind: str
    model_id: ArtifactId | None
    files: tuple[FileEntry, ...]

    @property
    def size_bytes(self) -> int:
        return sum(entry.size for entry in self.files)


def check_file_name(name: str) -> str:
    """Return `name` if it is a relative POSIX path that stays inside the artifact; else ArtifactCorrupt.

    Allowed: `/`-separated parts of letters, digits, `.`, `_`, `-`, none of them `.` or `..`, 255 characters in all, and not a
    name the store uses itself.
    """
    plain = all(_PART.fullmatch(part) and part not in (".", "..") for part in name.split("/"))
    if not plain or len(name) > _MAX_NAME_CHARS or name in (MANIFEST_NAME, SIGNATURE_NAME):
        raise ArtifactCorrupt(
            f"file names must be relative paths of letters, digits, '.', '_' and '-' inside the artifact; got {name[:80]!r}",
            details={"file": name[:80]},
        )
    return name


def is_artifact_id(name: str) -> bool:
    """Whether an entry found in a store has the form of an artifact's name; others are not ours to touch."""
    return is_digest(name)


def seal(manifest: bytes) -> bytes:
    """`manifest` with its digest behind it. ValueError for a manifest with a line break: canonical JSON has none."""
    if b"\n" in manifest:
        raise ValueError("a manifest must be canonical JSON, which holds no line break")
    return manifest + b'\n"' + hashlib.sha256(manifest).hexdigest().encode() + b'"\n'


def unseal(sealed: bytes) -> bytes:
    """The manifest of `sealed`; ArtifactCorrupt where a byte of it or of the seal changed."""
    manifest = sealed.partition(b"\n")[0]
    if sealed != seal(manifest):
        raise ArtifactCorrupt(
            f"{MANIFEST_NAME} does not match its own digest: it was damaged or edited after it was published; compile again",
            details={"file": MANIFEST_NAME},
        )
    return manifest


def read_head(manifest: bytes, *, artifact_id: str) -> ManifestHead:
    """The head of a manifest that must belong to `artifact_id`; ArtifactCorrupt for another's, or one no store can serve."""
    try:
        head = _head(json.loads(manifest))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ArtifactCorrupt(
            f"the manifest of {artifact_id} is not a manifest: {error!r}", details={"file": MANIFEST_NAME}
        ) from error
    if head.artifact_id != artifact_id:
        raise ArtifactCorrupt(
            f"the manifest stored for {artifact_id} belongs to {head.artifact_id[:80]}",
            details={"file": MANIFEST_NAME, "expected": artifact_id, "got": head.artifact_id[:80]},
        )
    names = [check_file_name(entry.path) for entry in head.files]
    if len(set(names)) != len(names):
        raise ArtifactCorrupt(f"the manifest of {artifact_id} lists a file twice", details={"file": MANIFEST_NAME})
    return head


def _head(fields: Any) -> ManifestHead:
    model = fields.get("model") or {}
    files = tuple(FileEntry(path=item["path"], sha256=item["sha256"], size=item["size"]) for item in fields["files"])
    for entry in files:
        if not (isinstance(entry.path, str) and is_digest(entry.sha256) and type(entry.size) is int and entry.size >= 0):
            raise ValueError(f"bad path, digest or size: {entry}")
    kind, artifact_id, model_id = fields["kind"], fields["artifact_id"], model.get("model_id")
    if not (isinstance(kind, str) and is_digest(artifact_id) and (model_id is None or is_digest(model_id))):
        raise ValueError("bad kind, artifact_id or model_id")
    return ManifestHead(artifact_id=ArtifactId(artifact_id), kind=kind, model_id=model_id, files=files)

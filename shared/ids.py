"""Ids that must not be mixed up are distinct types, and their wire forms are checked in one place."""

from __future__ import annotations

import re
import uuid
from typing import NewType

from shared.errors import FieldOutOfRange

PageId = NewType("PageId", int)
"""Index of a physical page in a pool, `0 .. num_pages`. Page 0 is the dump page: padding writes land there, nobody owns it."""
Slot = NewType("Slot", int)
"""Flat cell of a pool: `page * page_size + offset`."""
Ordinal = NewType("Ordinal", int)
"""Index of a live KV entry of one sequence, prompt included, counted in physical order. Shrinks when a round evicts."""
Position = NewType("Position", int)
"""What RoPE saw when the entry was written. Never shrinks and is never renumbered."""

RequestId = NewType("RequestId", str)
JobId = NewType("JobId", str)
ArtifactId = NewType("ArtifactId", str)
"""Lower-case hex sha256 over everything that went into a build (64 characters)."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def new_id() -> str:
    """A fresh id that no clock, host or process can repeat (uuid4 hex)."""
    return uuid.uuid4().hex


def is_digest(text: str) -> bool:
    """Whether `text` is a sha256 in lower-case hex (64 digits)."""
    return _DIGEST.fullmatch(text) is not None


def check_name(value: str, *, field: str) -> str:
    """Return `value` if it may serve as a caller-supplied id (letters, digits, `._-`, at most 128); else FieldOutOfRange."""
    if not _NAME.fullmatch(value):
        raise FieldOutOfRange(
            f"{field} must be 1 to 128 letters, digits, '.', '_' or '-' and start with a letter or digit; got {value[:64]!r}",
            field=field,
        )
    return value


def check_artifact_id(value: str, *, field: str = "artifact_id") -> ArtifactId:
    """Return `value` as an ArtifactId if it is 64 lower-case hex digits; else FieldOutOfRange."""
    if not is_digest(value):
        raise FieldOutOfRange(f"{field} must be 64 lower-case hex digits; got {value[:80]!r}", field=field)
    return ArtifactId(value)

"""The name of an artifact: one digest over everything that went into it.

A key is a set of named components, each reduced to its own digest, so that two keys can be compared part by part and a cache
miss explained without the original bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from shared.ids import ArtifactId, is_digest
from shared.manifest import canonical_json


@dataclass(frozen=True, slots=True)
class ArtifactKey:
    """Component name -> sha256 of its content (64 lower-case hex digits). ValueError for a digest of another shape."""

    components: Mapping[str, str]

    def __post_init__(self) -> None:
        if not self.components:
            raise ValueError("an artifact key needs at least one component")
        for name, digest in self.components.items():
            if not is_digest(digest):
                raise ValueError(f"component {name!r} must be a sha256 in lower-case hex; got {digest!r}")
        object.__setattr__(self, "components", MappingProxyType(dict(sorted(self.components.items()))))

    @classmethod
    def of(cls, components: Mapping[str, Any]) -> ArtifactKey:
        """A key over `bytes` taken as they are and JSON values taken in canonical form.

        Mappings may come in any order; the order of a sequence counts. Bytes, text and numbers never collide with each other.
        TypeError or ValueError for what JSON cannot hold: sets, NaN, keys that are not text.
        """
        return cls({name: _digest(value) for name, value in components.items()})

    @property
    def artifact_id(self) -> ArtifactId:
        return ArtifactId(hashlib.sha256(canonical_json(dict(self.components))).hexdigest())


def _digest(value: Any) -> str:
    if isinstance(value, bytes):
        return hashlib.sha256(b"bytes\0" + value).hexdigest()
    _refuse_coerced_keys(value)
    return hashlib.sha256(b"json\0" + canonical_json(value)).hexdigest()


def _refuse_coerced_keys(value: Any) -> None:
    """json.dumps writes the keys 1, True and None as text, where they would meet the keys "1", "true" and "null"."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"keys of an artifact key's components must be text; got {key!r}")
            _refuse_coerced_keys(item)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            _refuse_coerced_keys(item)


def explain_difference(wanted: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Names of the components of two keys that differ or that only one has, sorted; empty exactly when the keys are equal."""
    return sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))

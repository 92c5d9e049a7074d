"""What the service and a build process say to each other: one JSON object a line, both ways, never pickle.

    to the process      its request, once; then, where it asked to publish, an empty line that allows it
    from the process    Progress, any number; AskToPublish, at most once; one of Built, Explained, Keyed, Failed at the end

The request's pipe stays open as long as the service lives: its end is how a build learns that nobody waits for it any more.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from shared.artifacts.locate import StoreLocation
from shared.jobs.job import JobError
from shared.manifest import WriteCertificate, canonical_json

_STRICT = ConfigDict(extra="forbid", strict=True)


class Verb(StrEnum):
    BUILD = "build"
    EXPLAIN = "explain"
    KEY = "key"


@dataclass(frozen=True, slots=True)
class Request:
    """`spec` is a canonical CompileSpec. Paths are absolute."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    verb: Verb
    spec: str
    store: StoreLocation
    digest_cache: str
    model_roots: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Progress:
    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    stage: str
    fraction: float
    message: str
    kind: Literal["progress"] = "progress"


@dataclass(frozen=True, slots=True)
class AskToPublish:
    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    kind: Literal["ask_to_publish"] = "ask_to_publish"


@dataclass(frozen=True, slots=True)
class Built:
    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    artifact_id: str
    reused: bool
    kind: Literal["built"] = "built"


@dataclass(frozen=True, slots=True)
class Explained:
    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    caches: tuple[WriteCertificate, ...]
    kind: Literal["explained"] = "explained"


@dataclass(frozen=True, slots=True)
class Keyed:
    """The components of the key that a build of the spec would have."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    components: dict[str, str]
    kind: Literal["keyed"] = "keyed"


@dataclass(frozen=True, slots=True)
class Failed:
    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    error: JobError
    kind: Literal["failed"] = "failed"


Message = Progress | AskToPublish | Built | Explained | Keyed | Failed
_MESSAGE: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])
_REQUEST = TypeAdapter(Request)


def encode(value: Message | Request) -> bytes:
    """One line. Canonical JSON holds no line break."""
    return canonical_json(asdict(value)) + b"\n"


def decode_message(line: bytes) -> Message:
    """pydantic's ValidationError for a line that is none."""
    return _MESSAGE.validate_json(line)


def decode_request(line: bytes) -> Request:
    return _REQUEST.validate_json(line)

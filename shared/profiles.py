"""Optimization profiles: the ordered, named ranges of (batch, query length) one engine was built for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from shared.errors import FieldOutOfRange


class Phase(StrEnum):
    """What a step does for its sequences; also the name of the profile that serves it."""

    DECODE = "decode"
    PREFILL = "prefill"


@dataclass(frozen=True, slots=True)
class Range:
    """Inclusive bounds of one dynamic axis; `opt` is the size the backend tunes for."""

    min: int
    opt: int
    max: int

    def __post_init__(self) -> None:
        if not 1 <= self.min <= self.opt <= self.max:
            raise ValueError(f"a profile range needs 1 <= min <= opt <= max, got {self.min}, {self.opt}, {self.max}")

    def __contains__(self, size: int) -> bool:
        return self.min <= size <= self.max


@dataclass(frozen=True, slots=True)
class OptimizationProfile:
    """`batch` rows of `query_len` new tokens each."""

    name: str
    batch: Range
    query_len: Range

    def admits(self, batch: int, query_len: int) -> bool:
        return batch in self.batch and query_len in self.query_len

    def __str__(self) -> str:
        return f"{self.name}={self.batch.max}x{self.query_len.max}"


@dataclass(frozen=True, slots=True)
class ProfileSet:
    """Profiles in the engine's own order; an index into this tuple is the engine's profile index."""

    profiles: tuple[OptimizationProfile, ...]

    def __post_init__(self) -> None:
        names = [p.name for p in self.profiles]
        if len(set(names)) != len(names):
            raise ValueError(f"profile names must be unique, got {names}")
        for phase in Phase:
            if phase.value not in names:
                raise ValueError(f"an engine needs a profile named {phase.value!r}, got {names}")

    def __getitem__(self, name: str) -> OptimizationProfile:
        for profile in self.profiles:
            if profile.name == name:
                return profile
        raise KeyError(name)

    def index(self, name: str) -> int:
        return [p.name for p in self.profiles].index(name)

    @property
    def max_batch(self) -> int:
        return max(p.batch.max for p in self.profiles)

    @property
    def max_query_len(self) -> int:
        return max(p.query_len.max for p in self.profiles)

    def check(self, name: str, batch: int, query_len: int) -> None:
        """FieldOutOfRange naming every profile's range unless profile `name` admits the shape."""
        if not self[name].admits(batch, query_len):
            ranges = ", ".join(
                f"{p.name} batch {p.batch.min}..{p.batch.max} length {p.query_len.min}..{p.query_len.max}" for p in self.profiles
            )
            raise FieldOutOfRange(f"profile {name} does not admit batch {batch} x length {query_len}; this engine has {ranges}")


_SPEC = re.compile(r"([a-z][a-z0-9_]{0,31})=(\d{1,6})x(\d{1,7})")


def parse_profile(text: str) -> OptimizationProfile:
    """`decode=8x1` -> batch 1..8, query length 1..1. FieldOutOfRange when it has another form."""
    match = _SPEC.fullmatch(text)
    if not match or int(match[2]) < 1 or int(match[3]) < 1:
        raise FieldOutOfRange(
            f"a profile is NAME=BATCHxLENGTH, both at least 1, like decode=8x1; got {text[:64]!r}", field="profiles"
        )
    batch, length = int(match[2]), int(match[3])
    return OptimizationProfile(match[1], Range(1, batch, batch), Range(1, length, length))

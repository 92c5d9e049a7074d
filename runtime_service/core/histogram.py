"""Counts of observations by size: what the serving loop keeps of durations, and hands out as readings that never change."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class HistogramReading:
    """`counts[i]` observations lay above `bounds[i - 1]` and not above `bounds[i]`; the last count lay above every bound."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """(bound, observations not above it), for every bound and then for infinity."""
        return zip((*self.bounds, float("inf")), accumulate(self.counts), strict=True)


class Histogram:
    """One thread observes. An observation is a binary search and two additions: cheap enough for every token."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        self._reading: HistogramReading | None = None

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value
        self._reading = None

    def read(self) -> HistogramReading:
        """The same object as last time, if nothing was observed since: it is asked after every step."""
        if self._reading is None:
            self._reading = HistogramReading(self._bounds, tuple(self._counts), self._sum)
        return self._reading

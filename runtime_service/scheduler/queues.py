"""Sequences that wait for pages, in the order they will get them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from runtime_service.core.sequence import Sequence


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank


class WaitingQueue:
    """Ordered by rank: priority, then arrival. A preempted sequence keeps its arrival, so it returns to the place it had."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def head(self) -> Sequence | None:
        return self._sequences[0] if self._sequences else None

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=_rank)

    def discard(self, sequence: Sequence) -> None:
        """Take `sequence` out if it is here. Ranks are unique, so its own finds it and nobody else."""
        index = bisect_left(self._sequences, sequence.rank, key=_rank)
        if index < len(self._sequences) and self._sequences[index] is sequence:
            del self._sequences[index]

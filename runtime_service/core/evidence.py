"""What compaction did, in numbers: for one request (its usage) and for one pool (its metrics)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CompactionEvidence:
    """Sums over rounds. A row is K and V of one entry in one head of one layer; `bytes_moved` counts a moved byte once.

    `tokens_evicted` are entries that left; where heads keep entries of their own, as many as each of them dropped. A round of
    several sequences counts once for each, and each gets an equal part of its duration: the time it held up the serving thread. On
    a GPU the moves themselves run behind that.

    Rounds replayed after a preemption are part of a pool's sums, since the work was done, and not of a request's, whose tokens
    were evicted once.
    """

    rounds: int = 0
    tokens_evicted: int = 0
    rows_moved: int = 0
    bytes_moved: int = 0
    pages_freed: int = 0
    duration_s: float = 0.0

    def __add__(self, other: CompactionEvidence) -> CompactionEvidence:
        return CompactionEvidence(
            self.rounds + other.rounds,
            self.tokens_evicted + other.tokens_evicted,
            self.rows_moved + other.rows_moved,
            self.bytes_moved + other.bytes_moved,
            self.pages_freed + other.pages_freed,
            self.duration_s + other.duration_s,
        )

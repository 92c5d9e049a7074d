"""What the scheduler hands to the session: one engine call, decided, with nothing left to choose."""

from __future__ import annotations

from dataclasses import dataclass

from runtime_service.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """The next `query_len` tokens of each sequence through `profile`. Rows are equally long, so nothing is padded.

    Every sequence owns the pages its new tokens go to.
    """

    profile: str
    query_len: int
    sequences: tuple[Sequence, ...]

    def __post_init__(self) -> None:
        assert self.sequences, self
        assert 0 < self.query_len <= min(s.remaining for s in self.sequences), self


@dataclass(frozen=True, slots=True)
class PressureRound:
    """No page is free for the next step: compact this sequence now, before its interval is over, and schedule again."""

    sequence: Sequence

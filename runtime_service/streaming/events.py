"""What a request tells its caller, in order: deltas, one Finished for each sample, Usage; or Failure in their stead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from runtime_service.core.sampled import SampledToken
from shared.errors import QuireError


class FinishReason(StrEnum):
    """STOP: a stop string, a stop id or the end-of-text token. LENGTH: `max_tokens` are there. CANCELLED: somebody asked for it."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New tokens of sample `index` and new text, which may lag behind them. `tokens` carry log-probabilities if asked for."""

    index: int
    tokens: tuple[SampledToken, ...]
    text: str

    @classmethod
    def join(cls, deltas: Sequence[TokenDelta]) -> TokenDelta:
        """One or more of a sample, in order, as one."""
        if len(deltas) == 1:
            return deltas[0]
        tokens = tuple(token for delta in deltas for token in delta.tokens)
        return cls(deltas[0].index, tokens, "".join(delta.text for delta in deltas))


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of sample `index`; `match` is the stop string or stop id that ended it, None for the end-of-text token."""

    index: int
    reason: FinishReason
    match: str | int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """The last event of a request that did not fail. Counts are sums over its samples; `physical_length` in KV entries."""

    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int = 0
    compaction_rounds: int = 0
    tokens_evicted: int = 0
    pages_freed: int = 0
    physical_length: int = 0
    peak_pages: int = 0
    preemptions: int = 0
    queue_s: float = 0.0
    time_to_first_token_s: float = 0.0
    generate_s: float = 0.0
    rows_moved: int = 0
    bytes_moved: int = 0
    compaction_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Failure:
    """The last event of a request that failed after it was accepted."""

    error: QuireError


Event = TokenDelta | Finished | Usage | Failure

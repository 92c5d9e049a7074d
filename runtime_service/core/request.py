"""One accepted call of Generate, in the loop's own terms."""

from __future__ import annotations

from dataclasses import dataclass

from runtime_service.core.params import CompactionParams, SamplingParams, StopParams
from shared.ids import RequestId


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """`sampling.n` sequences from one prompt.

    Deadlines are readings of `time.monotonic()`; None waits for ever. `queue_deadline` bounds the wait for the first step,
    `run_deadline` the whole. Requests of a higher `priority` run first and are preempted last. `cache_salt` separates tenants
    wherever pages are shared between requests.
    """

    request_id: RequestId
    engine: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopParams
    compaction: CompactionParams | None = None
    priority: int = 0
    queue_deadline: float | None = None
    run_deadline: float | None = None
    cache_salt: str = ""

    @property
    def max_entries(self) -> int:
        """KV entries one sequence writes in all: the last sampled token is never fed back."""
        return len(self.prompt_ids) + self.stop.max_tokens - 1

    @property
    def max_physical(self) -> int:
        """Most KV entries one sequence holds at once."""
        if self.compaction is None:
            return self.max_entries
        return min(self.max_entries, self.compaction.budget + self.compaction.interval)

"""What an engine is doing, as one consistent reading taken between two steps."""

from __future__ import annotations

from dataclasses import dataclass

from runtime_service.core.evidence import CompactionEvidence
from runtime_service.session.latency import LatencyReadings


@dataclass(slots=True)
class Counters:
    """Sums since the engine was added. Prompt tokens are counted when a request starts, once, however often they are computed;
    `prefix_queries` are those looked for in the prefix cache, `prefix_hits` those found there."""

    steps: int = 0
    prompt_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    generated_tokens: int = 0
    requests_finished: int = 0
    requests_cancelled: int = 0
    requests_failed: int = 0
    pages_leaked: int = 0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A request waits until its first step. Of `pages_free`, `pages_cached` hold what later requests may go on from. `pages_leaked`
    were owned by nobody when the engine fell idle: 0, or a bug."""

    name: str
    requests_waiting: int
    requests_running: int
    requests_finished: int
    requests_cancelled: int
    requests_failed: int
    pages_total: int
    pages_free: int
    pages_cached: int
    pages_shared: int
    pages_leaked: int
    steps: int
    prompt_tokens: int
    prefix_queries: int
    prefix_hits: int
    generated_tokens: int
    preemptions: int
    compaction: CompactionEvidence
    latencies: LatencyReadings

    @property
    def pages_used(self) -> int:
        return self.pages_total - self.pages_free


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """Of every engine, in the order they were added."""

    engines: tuple[EngineLoad, ...]
    draining: bool

"""What an engine is doing, as one consistent reading taken between two steps."""

from __future__ import annotations

from dataclasses import dataclass

from runtime_service.core.evidence import CompactionEvidence
from runtime_service.session.latency import LatencyReadings


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A request waits until its first step. Of `pages_free`, `pages_cached` hold what later requests may go on from. Sums are those
    of session/statistics.py."""

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

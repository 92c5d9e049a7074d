"""The compiler in Prometheus' terms: what this process did, and what waits in the queue it shares with its replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from prometheus_client import Counter, Histogram, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from compiler_service.worker.record import AttemptRecord
from shared.errors import StoreUnavailable
from shared.jobs.job import JobState
from shared.jobs.queue import JobQueue, ReclaimReport
from shared.telemetry.buckets import DURATION_BOUNDS_S
from shared.telemetry.metrics import ServiceMetrics

QUEUE_ANSWER_S = 2.0
"""A scrape waits so long for the queue."""


class CompilerMetrics(ServiceMetrics):
    """One of these is told of everything that is counted. Dead letters and lapsed leases are counted by whoever moved the job."""

    def __init__(self) -> None:
        super().__init__("compiler")
        self._attempts = self._counter("attempts", "Build attempts that ended here; outcome: the job's state then.", "outcome")
        self._hits = self._counter("cache_hits", "Requests that needed no build: an earlier job answers, or the store.", "level")
        self._misses = self._counter("cache_misses", "Builds that were needed and made.")
        self._lapsed = self._counter("lease_expiries", "Leases that workers stopped renewing.")
        self._dead = self._counter("dead_letters", "Jobs given up after their last attempt.")
        self._stages = Histogram(
            f"{self.prefix}_stage_seconds",
            "Time a build spent in one stage.",
            ["stage"],
            buckets=DURATION_BOUNDS_S,
            registry=self.registry,
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{self.prefix}_{name}", text, labels, registry=self.registry)

    def note_joined(self) -> None:
        """A request was answered by the job of an earlier one."""
        self._hits.labels("job").inc()

    def note_attempt(self, record: AttemptRecord) -> None:
        self._attempts.labels(record.outcome).inc()
        for stage in record.stages:
            self._stages.labels(stage.name).observe(stage.seconds)
        if record.outcome == JobState.DEAD_LETTERED:
            self._dead.inc()
        elif record.job is not None and record.outcome == JobState.SUCCEEDED:
            if record.job.reused:
                self._hits.labels("artifact").inc()
            else:
                self._misses.inc()

    def note_reclaimed(self, report: ReclaimReport) -> None:
        self._lapsed.inc(report.lapsed)
        self._dead.inc(report.dead_lettered)


class QueueCollector(Collector):
    """Counts the jobs of the queue when somebody asks. Scrapes run on threads of their own; the queue answers on `loop`."""

    def __init__(self, prefix: str, queue: JobQueue, loop: asyncio.AbstractEventLoop) -> None:
        self._prefix, self._queue, self._loop = prefix, queue, loop

    def collect(self) -> Iterator[Metric]:
        answer = asyncio.run_coroutine_threadsafe(asyncio.wait_for(self._queue.count(), QUEUE_ANSWER_S), self._loop)
        jobs = GaugeMetricFamily(f"{self._prefix}_jobs", "Jobs the queue remembers; all replicas tell the same.", labels=["state"])
        try:
            counts = answer.result(2 * QUEUE_ANSWER_S)
        except (StoreUnavailable, TimeoutError):
            yield self._queue_up(0)
            return
        for state, count in counts.items():
            jobs.add_metric([state], count)
        yield self._queue_up(1)
        yield jobs

    def _queue_up(self, value: int) -> Metric:
        return GaugeMetricFamily(f"{self._prefix}_queue_up", "1 if the job queue answers.", value=value)

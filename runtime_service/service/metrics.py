"""The runtime in Prometheus' terms. Everything is read when somebody asks, from the snapshot the serving loop publishes anyway.

For the endpoint picker of the Gateway API inference extension see runtime_service/README.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from runtime_service.core.histogram import HistogramReading
from runtime_service.loop import ServingLoop
from runtime_service.service.engines import LoadedEngine
from runtime_service.session.load import EngineLoad

_Reader = Callable[[EngineLoad], float]
_GAUGES: dict[str, tuple[str, _Reader]] = {
    "requests_waiting": ("Requests that have not had their first step.", lambda load: load.requests_waiting),
    "requests_running": ("Requests that have had their first step and not ended.", lambda load: load.requests_running),
    "kv_usage_ratio": ("Share of the KV pages that some request owns, 0 to 1.", lambda load: load.pages_used / load.pages_total),
}
_COUNTERS: dict[str, tuple[str, _Reader]] = {
    "steps": ("Engine calls, and rounds made for want of pages.", lambda load: load.steps),
    "prompt_tokens": ("Prompt tokens of requests that have started, each once.", lambda load: load.prompt_tokens),
    "prefix_cache_queries": ("Prompt tokens looked for in the prefix cache.", lambda load: load.prefix_queries),
    "prefix_cache_hits": ("Prompt tokens found in the prefix cache and not computed.", lambda load: load.prefix_hits),
    "generated_tokens": ("Tokens sampled.", lambda load: load.generated_tokens),
    "preemptions": ("Sequences that gave their pages up and were computed again.", lambda load: load.preemptions),
    "kv_pages_leaked": ("Pages owned by nobody when the engine fell idle: 0, or a bug.", lambda load: load.pages_leaked),
    "compaction_rounds": ("Compaction rounds, one for each sequence.", lambda load: load.compaction.rounds),
    "compaction_evicted_tokens": ("KV entries evicted.", lambda load: load.compaction.tokens_evicted),
    "compaction_moved_bytes": ("Bytes of K and V moved, each once.", lambda load: load.compaction.bytes_moved),
    "compaction_freed_pages": ("Pages that compaction gave back.", lambda load: load.compaction.pages_freed),
    "compaction_seconds": ("Time spent in rounds.", lambda load: load.compaction.duration_s),
}
_STATES: dict[str, _Reader] = {
    "free": lambda load: load.pages_free - load.pages_cached,
    "cached": lambda load: load.pages_cached,
    "exclusive": lambda load: load.pages_used - load.pages_shared,
    "shared": lambda load: load.pages_shared,
}
_OUTCOMES: dict[str, _Reader] = {
    "finished": lambda load: load.requests_finished,
    "cancelled": lambda load: load.requests_cancelled,
    "failed": lambda load: load.requests_failed,
}
_HISTOGRAMS: dict[str, tuple[str, Callable[[EngineLoad], HistogramReading]]] = {
    "time_to_first_token": ("From acceptance to the first token, once a request.", lambda load: load.latencies.first_token),
    "inter_token": ("Between two tokens of one sample.", lambda load: load.latencies.inter_token),
    "queue": ("From acceptance to the first step.", lambda load: load.latencies.queue),
    "prefill": ("From the first step to the first token.", lambda load: load.latencies.prefill),
    "decode": ("From the first token to the end.", lambda load: load.latencies.decode),
}


class RuntimeCollector(Collector):
    """`engines` lists what is loaded. Series of an engine end when it is unloaded, and begin anew when it is loaded again."""

    def __init__(self, prefix: str, loop: ServingLoop, engines: Callable[[], Iterable[LoadedEngine]]) -> None:
        self._prefix, self._loop, self._engines = prefix, loop, engines

    def collect(self) -> Iterator[Metric]:
        load = self._loop.load()
        yield self._gauge("draining", "1 while nothing more is admitted.", float(load.draining))
        yield self._gauge("loop_stalled_seconds", "Time without progress with requests alive.", self._loop.stalled_for_s())
        yield self._cache_config()
        for name, (text, read) in _GAUGES.items():
            yield _fill(GaugeMetricFamily(f"{self._prefix}_{name}", text, labels=["engine"]), load.engines, read)
        for name, (text, read) in _COUNTERS.items():
            yield _fill(CounterMetricFamily(f"{self._prefix}_{name}", text, labels=["engine"]), load.engines, read)
        pages = GaugeMetricFamily(f"{self._prefix}_kv_pages", "KV pages; the states add up to all.", labels=["engine", "state"])
        yield _fill_each(pages, load.engines, _STATES)
        requests = CounterMetricFamily(f"{self._prefix}_requests", "Requests that have ended.", labels=["engine", "outcome"])
        yield _fill_each(requests, load.engines, _OUTCOMES)
        for name, (text, read_histogram) in _HISTOGRAMS.items():
            family = HistogramMetricFamily(f"{self._prefix}_{name}_seconds", text, labels=["engine"])
            for engine in load.engines:
                reading = read_histogram(engine)
                buckets = [("+Inf" if math.isinf(bound) else str(bound), count) for bound, count in reading.cumulative()]
                family.add_metric([engine.name], buckets, reading.sum)
            yield family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return GaugeMetricFamily(f"{self._prefix}_{name}", text, value=value)

    def _cache_config(self) -> Metric:
        """Constant facts as labels, with the label names that the inference extension reads."""
        labels = ["engine", "artifact", "backend", "layout", "block_size", "num_gpu_blocks"]
        text = "Engines loaded and the shape of their KV pools."
        family = GaugeMetricFamily(f"{self._prefix}_cache_config_info", text, labels=labels)
        for engine in self._engines():
            manifest, cache = engine.manifest, engine.manifest.cache
            shape = (str(cache.layout), str(cache.page_size), str(engine.num_pages - 1))
            family.add_metric([engine.name, manifest.artifact_id, manifest.backend, *shape], 1)
        return family


def _fill(
    family: GaugeMetricFamily | CounterMetricFamily, engines: Iterable[EngineLoad], read: _Reader
) -> GaugeMetricFamily | CounterMetricFamily:
    for engine in engines:
        family.add_metric([engine.name], read(engine))
    return family


def _fill_each(
    family: GaugeMetricFamily | CounterMetricFamily, engines: Iterable[EngineLoad], readers: dict[str, _Reader]
) -> GaugeMetricFamily | CounterMetricFamily:
    for engine in engines:
        for label, read in readers.items():
            family.add_metric([engine.name, label], read(engine))
    return family

"""What one engine has done, counted as it happens, and read as its load between two steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime_service.core.evidence import CompactionEvidence
from runtime_service.kv.allocator import PageAllocator
from runtime_service.session.generation import Generation, Sample
from runtime_service.session.latency import Latencies
from runtime_service.session.load import EngineLoad
from runtime_service.session.turnover import Turnover


@dataclass(slots=True)
class Statistics:
    """Sums since the engine was added. Prompt tokens are counted when a request starts, once, however often they are computed;
    `prefix_queries` are those looked for in the prefix cache, `prefix_hits` those found there. `pages_leaked` were owned by nobody
    when the engine fell idle: 0, or a bug."""

    turnover: Turnover
    latencies: Latencies = field(default_factory=Latencies)
    steps: int = 0
    prompt_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    generated_tokens: int = 0
    requests_finished: int = 0
    requests_cancelled: int = 0
    requests_failed: int = 0
    pages_leaked: int = 0

    def note_start(self, generation: Generation, *, looked_up: bool) -> None:
        """The first step of a request begins, whose prompt was looked for in the prefix cache if there is one."""
        self.latencies.note_start(generation.times)
        num_prompt_tokens = len(generation.request.prompt_ids)
        self.prompt_tokens += num_prompt_tokens
        if looked_up:
            self.prefix_queries += num_prompt_tokens
            self.prefix_hits += generation.cached_tokens

    def note_token(self, sample: Sample, now: float, *, is_first: bool) -> None:
        """A token of `sample` has come out; `is_first`: of its request."""
        self.generated_tokens += 1
        self.latencies.note_token(sample, now, is_first=is_first)

    def note_end(self, generation: Generation, now: float) -> None:
        """A request has ended, in whatever way."""
        self.latencies.note_end(generation.times, now)
        if generation.times.started is not None:
            self.turnover.note(now - generation.times.started)

    def read(
        self,
        name: str,
        allocator: PageAllocator,
        *,
        requests_waiting: int,
        requests_running: int,
        preemptions: int,
        compaction: CompactionEvidence,
    ) -> EngineLoad:
        """The sums beside what is now: pages by `allocator`, and what others count."""
        return EngineLoad(
            name=name,
            requests_waiting=requests_waiting,
            requests_running=requests_running,
            requests_finished=self.requests_finished,
            requests_cancelled=self.requests_cancelled,
            requests_failed=self.requests_failed,
            pages_total=allocator.capacity,
            pages_free=allocator.num_free,
            pages_cached=allocator.num_cached,
            pages_shared=allocator.num_shared,
            pages_leaked=self.pages_leaked,
            steps=self.steps,
            prompt_tokens=self.prompt_tokens,
            prefix_queries=self.prefix_queries,
            prefix_hits=self.prefix_hits,
            generated_tokens=self.generated_tokens,
            preemptions=preemptions,
            compaction=compaction,
            latencies=self.latencies.read(),
        )

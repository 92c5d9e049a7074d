"""An accepted request as a span: what its last event tells, and no clock but the call's own beside it.

Generate ─┬─ queue     submitted to first step
          ├─ prefill   first step to first token
          └─ decode    first token to end
"""

from __future__ import annotations

import time

from runtime_service.core.request import GenerationRequest
from runtime_service.streaming.events import Event, Failure, Usage
from shared.telemetry.trace import Attribute, Span

_LEFT = "CANCELLED"
"""The error of a request whose client went away: it has no last event."""


class RequestTrace:
    """Made when a request is submitted, told of every event, read once when its call has ended."""

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._submitted_s = time.monotonic()
        self._last: Event | None = None

    def note(self, event: Event) -> None:
        self._last = event

    def end(self) -> Span:
        ended_s, last = time.monotonic(), self._last
        attributes: dict[str, Attribute] = {
            "quire.request_id": self._request.request_id,
            "quire.engine": self._request.engine,
            "gen_ai.operation.name": "text_completion",
            "gen_ai.request.max_tokens": self._request.stop.max_tokens,
            "gen_ai.usage.input_tokens": len(self._request.prompt_ids),
        }
        if isinstance(last, Usage):
            attributes |= {
                "gen_ai.usage.output_tokens": last.generated_tokens,
                "quire.preemptions": last.preemptions,
                "quire.compaction.rounds": last.compaction_rounds,
                "quire.compaction.tokens_evicted": last.tokens_evicted,
            }
            return Span("Generate", self._submitted_s, ended_s, attributes, parts=self._phases(last))
        error = last.error.reason if isinstance(last, Failure) else _LEFT
        return Span("Generate", self._submitted_s, ended_s, attributes, error)

    def _phases(self, usage: Usage) -> tuple[Span, ...]:
        started = self._submitted_s + usage.queue_s
        first_token = self._submitted_s + usage.time_to_first_token_s
        return (
            Span("queue", self._submitted_s, started),
            Span("prefill", started, first_token),
            Span("decode", first_token, first_token + usage.generate_s),
        )

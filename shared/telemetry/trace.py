"""Finished work as spans. Services describe what they did as values; a Tracer makes of them what an operator reads.

Nothing is recorded while work is under way: a span is made from times that are kept anyway, when the work has ended.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from shared.errors import BackendUnavailable

Attribute = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of work from `begun_s` to `ended_s` on time.monotonic's clock. `error` is the reason it failed for, if it did."""

    name: str
    begun_s: float
    ended_s: float
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    error: str = ""
    parts: tuple[Span, ...] = ()

    @property
    def seconds(self) -> float:
        return self.ended_s - self.begun_s


_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def traceparent_of(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The `traceparent` (W3C trace context) that came with a call; empty where there is none, or none of that form."""
    for key, value in metadata:
        if key == "traceparent" and isinstance(value, str) and _TRACEPARENT.fullmatch(value):
            return value
    return ""


Tracer = Callable[[Span, str], None]
"""Takes a finished root span and the W3C `traceparent` it belongs under (empty: it begins a trace). Any thread; never raises."""


class StageClock:
    """The parts of work that goes through stages: each lasts until the next one is entered."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._parts: list[Span] = []
        self._stage, self._entered_s = "", 0.0

    @property
    def stage(self) -> str:
        """The stage it is in, empty before the first."""
        return self._stage

    def enter(self, stage: str) -> None:
        """Entering the stage it is in already changes nothing."""
        if stage != self._stage:
            now = self._clock()
            self._leave(now)
            self._stage, self._entered_s = stage, now

    def end(self) -> tuple[Span, ...]:
        """Every stage so far; the last one ends now."""
        self._leave(self._clock())
        self._stage = ""
        return tuple(self._parts)

    def _leave(self, now: float) -> None:
        if self._stage:
            self._parts.append(Span(self._stage, self._entered_s, now))


def untraced(span: Span, traceparent: str) -> None:
    """The Tracer of a service that traces nothing."""


def open_tracer(service: str, endpoint: str | None) -> AbstractContextManager[Tracer]:
    """Exports to the OTLP collector at `endpoint` (http://host:port, gRPC) until closed; without one does nothing.

    BackendUnavailable for an endpoint without the extra `otel`.
    """
    if endpoint is None:
        return nullcontext(untraced)
    try:
        from shared.telemetry.otel import export_to  # an extra: most installations trace nothing
    except ModuleNotFoundError as error:
        raise BackendUnavailable(f"traces need the extra 'otel' (pip install 'quire[otel]'): {error}") from error
    return export_to(service, endpoint)

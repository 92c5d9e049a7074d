"""Spans to OpenTelemetry. Needs the extra `otel`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shared.telemetry.trace import Span, Tracer

_CLOSE_MS = 5000


@contextmanager
def export_to(service: str, endpoint: str) -> Iterator[Tracer]:
    """A Tracer that exports in batches from a thread of its own; what waits is sent before this closes, for 5 s at most."""
    provider = new_provider(service)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=_CLOSE_MS / 1000)))
    try:
        yield tracer_of(provider)
    finally:
        provider.force_flush(_CLOSE_MS)
        provider.shutdown()


def new_provider(service: str) -> TracerProvider:
    return TracerProvider(resource=Resource.create({"service.name": f"quire-{service}", "service.version": version("quire")}))


def tracer_of(provider: TracerProvider) -> Tracer:
    """Spans of `provider`; it samples, processes and exports them as it is set up."""
    tracer, propagator = provider.get_tracer("quire"), TraceContextTextMapPropagator()

    def record(span: Span, traceparent: str) -> None:
        # A traceparent that is none begins a new trace, as W3C asks for.
        parent = propagator.extract({"traceparent": traceparent})
        _record(tracer, span, parent, SpanKind.SERVER, to_unix_s=time.time() - time.monotonic())

    return record


def _record(tracer: trace.Tracer, span: Span, parent: Context, kind: SpanKind, to_unix_s: float) -> None:
    """`to_unix_s` leads from the clock of spans to Unix time: one for a tree, so that its parts meet."""
    made = tracer.start_span(
        span.name, parent, kind, attributes=dict(span.attributes), start_time=_nanoseconds(span.begun_s + to_unix_s)
    )
    if span.error:
        made.set_status(Status(StatusCode.ERROR, span.error))
    for part in span.parts:
        _record(tracer, part, trace.set_span_in_context(made, parent), SpanKind.INTERNAL, to_unix_s)
    made.end(_nanoseconds(span.ended_s + to_unix_s))


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)

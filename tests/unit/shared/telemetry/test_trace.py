"""Spans as values, and as OpenTelemetry sees them."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from shared.errors import BackendUnavailable
from shared.telemetry.otel import new_provider, tracer_of
from shared.telemetry.trace import Span, StageClock, open_tracer, traceparent_of

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


@pytest.fixture
def exported():
    exporter = InMemorySpanExporter()
    provider = new_provider("test")
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield tracer_of(provider), exporter
    provider.shutdown()


def test_a_span_and_its_parts_keep_their_times_and_belong_together(exported):
    record, exporter = exported
    now = time.monotonic()
    record(Span("work", now - 3, now, {"n": 4}, parts=(Span("first", now - 3, now - 2), Span("second", now - 2, now))), "")
    first, second, work = exporter.get_finished_spans()
    assert [span.name for span in (work, first, second)] == ["work", "first", "second"]
    assert [(span.end_time - span.start_time) / 1e9 for span in (work, first, second)] == pytest.approx([3, 1, 2], abs=1e-6)
    assert work.end_time / 1e9 == pytest.approx(time.time(), abs=60)
    assert {span.parent.span_id for span in (first, second)} == {work.context.span_id}
    assert (work.parent, work.kind, first.kind) == (None, SpanKind.SERVER, SpanKind.INTERNAL)
    assert (work.attributes["n"], work.status.status_code) == (4, StatusCode.UNSET)
    assert work.resource.attributes["service.name"] == "quire-test"


def test_a_traceparent_decides_the_trace_and_an_error_shows(exported):
    record, exporter = exported
    record(Span("work", 1.0, 2.0, error="QUEUE_TIMEOUT"), TRACEPARENT)
    (span,) = exporter.get_finished_spans()
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "QUEUE_TIMEOUT")


def test_a_caller_that_does_not_sample_is_heard(exported):
    record, exporter = exported
    record(Span("work", 1.0, 2.0), f"00-{TRACE}-{PARENT}-00")
    assert exporter.get_finished_spans() == ()


@pytest.mark.parametrize(
    ("metadata", "found"),
    [
        ([], ""),
        ([("x", "y"), ("traceparent", TRACEPARENT)], TRACEPARENT),
        ([("traceparent", TRACEPARENT + "0")], ""),
        ([("traceparent", TRACEPARENT.upper())], ""),
        ([("traceparent", "x" * 100_000)], ""),
        ([("traceparent", b"\xff")], ""),
    ],
)
def test_only_a_traceparent_is_taken_for_one(metadata, found):
    assert traceparent_of(metadata) == found


def test_stages_follow_each_other():
    times = iter([1.0, 2.5, 4.0])
    clock = StageClock(lambda: next(times))
    for stage in ("load", "load", "build"):
        clock.enter(stage)
    assert clock.stage == "build"
    assert [(span.name, span.begun_s, span.ended_s) for span in clock.end()] == [("load", 1.0, 2.5), ("build", 2.5, 4.0)]


def test_nothing_is_traced_without_an_endpoint(monkeypatch):
    monkeypatch.setitem(sys.modules, "shared.telemetry.otel", None)
    with open_tracer("test", None) as tracer:
        tracer(Span("work", 1.0, 2.0), TRACEPARENT)


def test_an_endpoint_without_the_extra_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "shared.telemetry.otel", None)
    with pytest.raises(BackendUnavailable, match=r"quire\[otel\]"):
        open_tracer("test", "http://127.0.0.1:4317")


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP collector that keeps what it gets."""

    def __init__(self):
        self.exports = []

    def Export(self, request, context):
        self.exports.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()


def test_what_is_traced_reaches_a_collector_before_the_tracer_closes():
    collector, server = Collector(), grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with open_tracer("runtime", f"http://127.0.0.1:{port}") as tracer:
        tracer(Span("Generate", 1.0, 2.0, parts=(Span("queue", 1.0, 1.5),)), TRACEPARENT)
    server.stop(0)
    (export,) = collector.exports
    (resource,) = export.resource_spans
    assert {a.key: a.value.string_value for a in resource.resource.attributes}["service.name"] == "quire-runtime"
    assert [span.name for scope in resource.scope_spans for span in scope.spans] == ["queue", "Generate"]

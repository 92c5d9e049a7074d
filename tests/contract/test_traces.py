"""Spans of real requests and real jobs, under the trace of whoever called: from gRPC metadata to OpenTelemetry's exporter."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from shared.ids import new_id
from shared.pb.quire.v1 import compiler_pb2
from shared.telemetry.otel import new_provider, tracer_of
from tests.contract.compiler.conftest import start  # noqa: F401 - a fixture
from tests.contract.runtime.conftest import generate, serve

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CALLED_BY = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)


class Exported:
    def __init__(self):
        self.exporter = InMemorySpanExporter()
        provider = new_provider("test")
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = tracer_of(provider)

    async def spans(self, name, count=1):
        """The finished spans of this name, once there are `count`."""
        async with asyncio.timeout(60):
            while len(found := [span for span in self.exporter.get_finished_spans() if span.name == name]) < count:
                await asyncio.sleep(0.01)
        return found

    def parts_of(self, root):
        return [s for s in self.exporter.get_finished_spans() if s.parent and s.parent.span_id == root.context.span_id]


@pytest.fixture
def exported():
    return Exported()


async def test_a_request_is_a_span_with_its_phases_under_the_callers(tmp_path, exported):
    async with serve(tmp_path, tracer=exported.tracer) as served:
        await served.load()
        call = served.inference.Generate(generate([1, 2, 3], 5, request_id="mine"), metadata=CALLED_BY)
        usage = [event async for event in call][-1].usage
        (root,) = await exported.spans("Generate")
        assert (f"{root.context.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE, PARENT)
        facts = {"quire.request_id": "mine", "gen_ai.usage.input_tokens": 3, "gen_ai.usage.output_tokens": 5}
        assert facts.items() <= dict(root.attributes).items()
        parts = exported.parts_of(root)
        assert [part.name for part in parts] == ["queue", "prefill", "decode"]
        assert all(before.end_time == after.start_time for before, after in itertools.pairwise(parts))
        lasted = [(part.end_time - part.start_time) / 1e9 for part in parts]
        assert lasted == pytest.approx(
            [usage.queue_s, usage.time_to_first_token_s - usage.queue_s, usage.generate_s], rel=1e-3, abs=1e-5
        )


async def test_requests_that_do_not_finish_say_why(tmp_path, exported):
    async with serve(tmp_path, tracer=exported.tracer) as served:
        await served.load()
        served.gate.fail_with = RuntimeError("the device is on fire")
        await served.events(generate([1]))
        left = served.inference.Generate(generate([1], 50))
        await left.read()
        left.cancel()
        roots = await exported.spans("Generate", 2)
        assert [root.status.description for root in roots] == ["INTERNAL", "CANCELLED"]
        assert all(root.parent is None and not exported.parts_of(root) for root in roots)


async def test_an_attempt_is_a_span_with_its_stages_under_the_caller_of_its_job(start, exported):  # noqa: F811
    """The trace context waits in the queue with the job."""
    async with start(tracer=exported.tracer) as client:
        client.source(report=[["fetch", 0.0, "m"], ["build", 0.0, "m"]], end="crash")
        spec = client.spec("m")
        limits = compiler_pb2.JobLimits(max_attempts=2)
        request = compiler_pb2.CreateCompileJobRequest(request_id=new_id(), spec=spec, limits=limits)
        job_id = (await client.stub.CreateCompileJob(request, metadata=CALLED_BY)).job.job_id
        roots = await exported.spans("compile", 2)
        assert {f"{root.context.trace_id:032x}" for root in roots} == {TRACE}
        facts = [(r.attributes["quire.attempt"], r.attributes["quire.outcome"], r.status.description) for r in roots]
        assert facts == [(1, "queued", "BUILD_FAILED"), (2, "dead_lettered", "BUILD_FAILED")]
        assert {root.attributes["quire.job_id"] for root in roots} == {job_id}
        assert [[part.name for part in exported.parts_of(root)] for root in roots] == [["fetch", "build"]] * 2

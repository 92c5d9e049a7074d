"""How a stream ends that does not end by itself: its call is gone, its time is up, its reader stalls, its step fails."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from shared.pb.quire.v1 import control_pb2, inference_pb2_grpc
from shared.pb.quire.v1 import inference_pb2 as pb
from tests.contract.runtime.conftest import finish_of, generate, kinds, serve, tokens_of
from tests.support.load.clients import COMPACTED, NARROW, rest
from tests.support.tiny_engine import Oracle, sink_recent_rounds

PROMPT = [3, 1, 4, 1, 5]
ORACLE = Oracle()
EXPECTED = ORACLE.expected_tokens(PROMPT, 8)


async def test_a_cancelled_call_gives_its_pages_back(served):
    """BR-152."""
    call = served.inference.Generate(generate(PROMPT, 50))
    async for event in call:
        if event.WhichOneof("event") == "delta":
            break
    call.cancel()
    assert (await served.until_ended(1)).requests_cancelled == 1
    assert tokens_of(await served.events(generate(PROMPT))) == EXPECTED


async def test_a_call_cancelled_before_its_first_step_gives_its_place_back(served):
    """BR-118."""
    served.gate.close()
    calls = [served.inference.Generate(generate(PROMPT)) for _ in range(12)]
    for call in calls:
        await call.read()
    for call in calls:
        call.cancel()
    served.gate.open()
    assert (await served.until_ended(12)).requests_cancelled == 12


async def test_a_lost_connection_gives_its_pages_back(served):
    async with grpc.aio.insecure_channel(served.runtime.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        served.gate.close()
        call = type(served.inference)(channel).Generate(generate(PROMPT, 50))
        await call.read()
    served.gate.open()
    assert (await served.until_ended(1)).requests_cancelled == 1


async def test_the_run_deadline_ends_an_accepted_stream_with_an_error(served):
    request = generate(PROMPT, 50)
    request.run_timeout.FromMilliseconds(1)
    served.gate.close()
    call = served.inference.Generate(request)
    await call.read()
    await asyncio.sleep(0.01)
    served.gate.open()
    events = []
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)
    assert kinds(events)[-1] == "error"
    assert (events[-1].error.reason, events[-1].error.retryable) == ("RUN_TIMEOUT", True)
    assert await call.code() is grpc.StatusCode.OK
    assert (await served.until_ended(1)).requests_failed == 1


async def test_the_queue_deadline_ends_a_request_that_never_ran(served):
    served.gate.close()
    running = served.inference.Generate(generate(PROMPT, 50))
    await running.read()
    await served.gate.until_held()
    request = generate(PROMPT)
    request.queue_timeout.FromMilliseconds(1)
    late = served.inference.Generate(request)
    await late.read()
    await asyncio.sleep(0.01)
    served.gate.open()
    assert (await late.read()).error.reason == "QUEUE_TIMEOUT"
    await served.until_ended(2)


async def test_a_failing_step_is_one_error_event_and_the_engine_serves_on(served):
    served.gate.fail_with = RuntimeError("the device is on fire")
    events = await served.events(generate(PROMPT))
    assert kinds(events) == ["accepted", "error"]
    assert events[-1].error.code == grpc.StatusCode.INTERNAL.value[0]
    assert not events[-1].error.retryable
    assert (await served.until_ended(1)).requests_failed == 1
    assert tokens_of(await served.events(generate(PROMPT))) == EXPECTED


async def test_a_stalled_reader_loses_its_stream_and_its_pages(tmp_path):
    """Nobody reads, and the words are long: what transport and buffers hold is full well before the end."""
    async with serve(tmp_path, word_size=10_000, stall_after_s=0.05) as served:
        await served.load()
        kv = pb.KVOptions(policy=pb.CompactionOptions(name="sink_recent", budget=8, interval=4))
        call = served.inference.Generate(generate(PROMPT, 4000, kv=kv))
        await call.read()
        await served.until_ended(1)
        events = []
        while (event := await call.read()) is not grpc.aio.EOF:
            events.append(event)
        assert (events[-1].error.reason, events[-1].error.retryable) == ("READER_STALLED", True)
        shown = tokens_of(events)
        assert len(shown) < 4000
        rounds = sink_recent_rounds(len(PROMPT) + len(shown), budget=8, interval=4, sinks=4)
        assert shown == ORACLE.expected_tokens(PROMPT, len(shown), rounds), "what was generated until then arrives whole"


async def test_abort_ends_a_stream_as_cancelled_with_usage(served):
    served.gate.close()
    call = served.inference.Generate(generate(PROMPT, 50, request_id="victim"))
    await call.read()
    abort = control_pb2.AbortRequest(request_id="victim")
    assert (await served.control.Abort(abort)).aborted
    served.gate.open()
    events = []
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)
    assert finish_of(events).reason == pb.FINISH_REASON_CANCELLED
    assert kinds(events)[-1] == "usage"
    assert (await served.until_ended(1)).requests_cancelled == 1
    assert not (await served.control.Abort(abort)).aborted, "idempotent"


async def test_a_client_that_lives_and_never_reads_loses_its_call_with_its_connection(tmp_path):
    """What it was sent fills the transport, and no status gets past that; the call must not stay for as long as the client does."""
    ended = asyncio.Event()
    limits = {"stall_after_s": 0.05, "max_connection_age_s": 1.0, "max_run_s": 1.0}
    async with serve(tmp_path, word_size=10_000, tracer=lambda *_: ended.set(), **limits) as served:
        await served.load()
        async with grpc.aio.insecure_channel(served.runtime.address, NARROW) as channel:
            call = inference_pb2_grpc.InferenceStub(channel).Generate(generate(PROMPT, 4000, kv=COMPACTED))
            await call.read()
            await served.until_ended(1)
            assert not ended.is_set(), "its end is told once the call has one"
            async with asyncio.timeout(30):
                await ended.wait()
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                [event async for event in rest(call)]

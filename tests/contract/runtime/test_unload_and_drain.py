"""Unload, Abort and Drain over the wire: what runs is finished or ended, and the memory comes back."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from shared.pb.quire.v1 import control_pb2 as pb
from shared.pb.quire.v1 import inference_pb2 as inference
from tests.contract.runtime.conftest import LINEAR_ID, finish_of, generate, listed, refused, serve, tokens_of
from tests.support.tiny_engine import Oracle

PROMPT = [3, 1, 4, 1, 5]
EXPECTED = Oracle().expected_tokens(PROMPT, 8)


def resident_bytes():
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


async def test_unloads_that_wait_keep_no_drain_waiting(tmp_path):
    """However few threads the host's cores give the process."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    async with serve(tmp_path) as served:
        await served.load()
        served.gate.close()
        call = served.inference.Generate(generate(PROMPT, 60))
        await served.gate.until_held()
        request = pb.UnloadEngineRequest(name="tiny", grace=Duration(seconds=60))
        unloads = [asyncio.ensure_future(served.control.UnloadEngine(request)) for _ in range(3)]
        while not served.runtime.loop._removing:
            await asyncio.sleep(0.005)
        drain = asyncio.ensure_future(served.control.Drain(pb.DrainRequest(deadline=Duration(seconds=60))))
        async with asyncio.timeout(20):
            while not served.runtime.loop.load().draining:
                await asyncio.sleep(0.005)
        served.gate.open()
        assert tokens_of([event async for event in call]) == Oracle().expected_tokens(PROMPT, 60)
        assert (await drain).finished == 1
        await asyncio.gather(*unloads, return_exceptions=True)


async def test_an_unloaded_engine_is_gone(served):
    await served.control.UnloadEngine(pb.UnloadEngineRequest(name="tiny"))
    assert await listed(served) == []
    assert served.loader.engines[0].closed
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await served.events(generate(PROMPT))
    assert failure.value.code() is grpc.StatusCode.NOT_FOUND
    await refused(served.control.UnloadEngine(pb.UnloadEngineRequest(name="tiny")), "MODEL_NOT_FOUND")
    await served.load()
    assert tokens_of(await served.events(generate(PROMPT))) == EXPECTED


async def test_an_engine_that_cannot_be_closed_leaves_its_name_free(served, monkeypatch):
    def close():
        raise RuntimeError("device lost")

    monkeypatch.setattr(served.loader.engines[0], "close", close)
    await served.control.UnloadEngine(pb.UnloadEngineRequest(name="tiny"))
    assert await listed(served) == []
    await served.load()
    assert tokens_of(await served.events(generate(PROMPT))) == EXPECTED


async def test_unloading_returns_the_memory_of_the_pool_to_the_system(served):
    """Again and again: 64 MiB of pages, all of them written, beside an engine that stays."""
    left = []
    for _ in range(3):
        await served.load(LINEAR_ID, name="large", num_pages=4097)
        for tensor in served.runtime.loop._sessions["large"].pool.tensors:
            tensor.fill_(1.0)
        assert tokens_of(await served.events(generate([1, 2, 3], engine="large")))
        held = resident_bytes()
        del tensor
        await served.control.UnloadEngine(pb.UnloadEngineRequest(name="large"))
        left.append(resident_bytes())
        assert held - left[-1] > 56 << 20
    assert left[-1] - left[0] < 16 << 20
    assert tokens_of(await served.events(generate([1, 2, 3])))


async def test_unloading_ends_requests_as_retryable(served):
    served.gate.close()
    call = served.inference.Generate(generate(PROMPT, 50))
    await call.read()
    unload = asyncio.create_task(_await(served.control.UnloadEngine(pb.UnloadEngineRequest(name="tiny"))))
    await asyncio.sleep(0)
    served.gate.open()
    last = None
    while (event := await call.read()) is not grpc.aio.EOF:
        last = event
    assert last.error.retryable
    await unload


async def test_unloading_with_grace_lets_requests_finish(served):
    served.gate.close()
    call = served.inference.Generate(generate(PROMPT))
    events = [await call.read()]
    request = pb.UnloadEngineRequest(name="tiny", grace=Duration(seconds=60))
    unload = asyncio.create_task(_await(served.control.UnloadEngine(request)))
    served.gate.open()
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)
    assert tokens_of(events) == EXPECTED
    await unload
    assert await listed(served) == []


async def _await(call):
    return await call


@pytest.mark.parametrize("grace", [Duration(seconds=-1), Duration(seconds=601)])
async def test_waits_are_bounded(served, grace):
    await refused(served.control.UnloadEngine(pb.UnloadEngineRequest(name="tiny", grace=grace)), "FIELD_OUT_OF_RANGE", "grace")
    await refused(served.control.Drain(pb.DrainRequest(deadline=grace)), "FIELD_OUT_OF_RANGE", "deadline")
    assert len(await listed(served)) == 1


async def test_abort_of_nobody_is_no_error(served):
    """BR-118."""
    assert not (await served.control.Abort(pb.AbortRequest(request_id="nobody"))).aborted
    await refused(served.control.Abort(pb.AbortRequest(request_id="")), "FIELD_OUT_OF_RANGE", "request_id")


async def test_a_drain_finishes_what_runs_and_admits_nothing(served):
    served.gate.close()
    call = served.inference.Generate(generate(PROMPT))
    events = [await call.read()]
    drain = asyncio.create_task(_await(served.control.Drain(pb.DrainRequest(deadline=Duration(seconds=60)))))
    while not (await served.control.GetLoad(pb.GetLoadRequest())).draining:
        await asyncio.sleep(0.005)
    error = await refused(_await_first(served.inference.Generate(generate(PROMPT))), "DRAINING")
    assert error.retryable
    served.gate.open()
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)
    assert tokens_of(events) == EXPECTED
    assert finish_of(events).reason == inference.FINISH_REASON_LENGTH
    report = await drain
    assert (report.finished, report.aborted) == (1, 0)


async def test_a_drain_ends_the_rest_as_retryable(served):
    served.gate.close()
    call = served.inference.Generate(generate(PROMPT, 50))
    await call.read()
    await served.gate.until_held()
    drain = asyncio.create_task(_await(served.control.Drain(pb.DrainRequest())))
    while not (await served.control.GetLoad(pb.GetLoadRequest())).draining:
        await asyncio.sleep(0.005)
    served.gate.open()
    last = None
    while (event := await call.read()) is not grpc.aio.EOF:
        last = event
    assert (last.error.reason, last.error.retryable) == ("DRAINING", True)
    report = await drain
    assert (report.finished, report.aborted) == (0, 1)


async def _await_first(call):
    return await call.read()

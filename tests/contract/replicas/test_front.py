"""Two runtimes behind one address: a client cannot tell them from one, but for what they hold together."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from runtime_service.config import RuntimeSettings
from runtime_service.replicas.__main__ import front
from runtime_service.replicas.replica import REPORT_PERIOD_S
from shared.pb.quire.v1 import control_pb2, control_pb2_grpc, inference_pb2_grpc
from shared.rpc.server import LIVENESS
from shared.rpc.status import from_rpc_error
from tests.contract.runtime.conftest import NUM_PAGES, PAGED_ID, Served, generate, serve, tokens_of
from tests.support.tiny_engine import Oracle

PROMPT = [5, 6, 7]
SERVING = health_pb2.HealthCheckResponse.SERVING


@dataclasses.dataclass
class Fronted:
    replicas: list[Served]
    inference: inference_pb2_grpc.InferenceStub
    control: control_pb2_grpc.ControlStub
    health: health_pb2_grpc.HealthStub

    async def load(self, **fields: object) -> control_pb2.Engine:
        request = control_pb2.LoadEngineRequest(**({"artifact_id": PAGED_ID, "name": "tiny", "num_pages": NUM_PAGES} | fields))
        return (await self.control.LoadEngine(request)).engine

    async def say(self, **options: object) -> list[int]:
        return tokens_of([event async for event in self.inference.Generate(generate(PROMPT, **options))])

    async def until(self, holds: Callable[[control_pb2.EngineLoad], bool]) -> None:
        """Returns once the load of both together is so."""
        while not holds((await self.control.GetLoad(control_pb2.GetLoadRequest())).engines[0]):
            await asyncio.sleep(0.01)

    async def liveness(self) -> int:
        return (await self.health.Check(health_pb2.HealthCheckRequest(service=LIVENESS))).status

    def finished(self) -> list[int]:
        return [sum(load.requests_finished for load in served.runtime.loop.load().engines) for served in self.replicas]

    async def finish(self, expected: list[int]) -> bool:
        """Whether each comes to have finished so many: a stream may end before the turn it ends in is reported."""
        for _ in range(200):
            if self.finished() == expected:
                return True
            await asyncio.sleep(0.01)
        return False


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[Fronted]:
    async with AsyncExitStack() as running:
        replicas = [await running.enter_async_context(serve(tmp_path / str(index))) for index in range(2)]
        settings = RuntimeSettings(data=tmp_path, address="127.0.0.1:0", drain_s=0.0)
        address = await running.enter_async_context(front(settings, [served.runtime.address for served in replicas]))
        channel = await running.enter_async_context(grpc.aio.insecure_channel(address))
        stubs = (inference_pb2_grpc.InferenceStub, control_pb2_grpc.ControlStub, health_pb2_grpc.HealthStub)
        yield Fronted(replicas, *(stub(channel) for stub in stubs))


async def test_an_engine_is_loaded_on_both_and_its_memory_is_theirs_together(two: Fronted) -> None:
    engine = await two.load()
    assert (engine.name, engine.num_pages) == ("tiny", 2 * NUM_PAGES)
    (listed,) = (await two.control.ListEngines(control_pb2.ListEnginesRequest())).engines
    assert listed.kv_bytes == engine.kv_bytes
    (load,) = (await two.control.GetLoad(control_pb2.GetLoadRequest())).engines
    assert load.pages_total == 2 * (NUM_PAGES - 1)
    await two.control.UnloadEngine(control_pb2.UnloadEngineRequest(name="tiny"))
    assert all(served.runtime.engines.all() == () for served in two.replicas)


async def test_a_burst_goes_to_both_and_each_request_gets_its_own_tokens(two: Fronted) -> None:
    await two.load()
    answers = await asyncio.gather(*(two.say(max_tokens=3 + n) for n in range(12)))
    assert answers == [Oracle().expected_tokens(PROMPT, 3 + n) for n in range(12)]
    assert min(two.finished()) >= 4


async def test_a_busy_replica_gets_no_more_while_another_is_free(two: Fronted) -> None:
    """Of equals the first is chosen; held after a few steps it uses pages, and what comes next goes to the other: back to back,
    between two reports, and after one."""
    await two.load()
    first = two.replicas[0]
    first.gate.let_through(4)
    held = asyncio.create_task(two.say(max_tokens=40))
    while first.runtime.loop.load().engines[0].pages_free == NUM_PAGES - 1:
        await asyncio.sleep(0.01)
    for pause_s in (0.0, 0.0, 0.0, 2 * REPORT_PERIOD_S, 0.0):
        await asyncio.sleep(pause_s)
        await two.say(max_tokens=2)
    assert await two.finish([0, 5])
    first.gate.open()
    await held
    assert await two.finish([1, 5])


async def test_a_replica_whose_loop_has_died_gets_nothing(two: Fronted) -> None:
    """It holds no pages that grow, so by its last report it would be the one to choose."""
    await two.load()
    assert await two.liveness() == SERVING
    dead = two.replicas[0].runtime.loop
    dead._inbox.post(lambda: 1 / 0)
    while dead.stalled_for_s() != math.inf:
        await asyncio.sleep(0.01)
    while await two.liveness() == SERVING:  # whoever supervises the front is told
        await asyncio.sleep(0.01)
    for _ in range(3):
        await two.say(max_tokens=2)
    assert await two.finish([0, 3])


async def test_refusals_of_a_replica_are_passed_on_word_for_word(two: Fronted) -> None:
    await two.load()
    for options, reason in (({"max_tokens": 10_000_000}, "FIELD_OUT_OF_RANGE"), ({"engine": "none"}, "MODEL_NOT_FOUND")):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await two.say(**options)
        assert from_rpc_error(refused.value).reason == reason


async def test_an_engine_one_replica_refuses_is_on_none(two: Fronted) -> None:
    await two.replicas[1].load(name="taken")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await two.load(name="taken", artifact_id="c" * 64)
    assert from_rpc_error(refused.value).reason == "IN_USE"
    assert two.replicas[0].runtime.engines.all() == ()


async def test_a_client_that_leaves_leaves_no_request_behind(two: Fronted) -> None:
    await two.load()
    gate = two.replicas[0].gate
    gate.let_through(4)
    call = two.inference.Generate(generate(PROMPT, max_tokens=50, request_id="gone"))
    await call.read()
    await two.until(lambda load: load.requests_running == 1)
    call.cancel()
    gate.open()
    await two.until(lambda load: load.requests_running + load.requests_waiting == 0 and load.pages_free == load.pages_total)
    assert not (await two.control.Abort(control_pb2.AbortRequest(request_id="gone"))).aborted


async def test_a_drain_drains_all(two: Fronted) -> None:
    await two.load()
    await two.control.Drain(control_pb2.DrainRequest())
    assert (await two.control.GetLoad(control_pb2.GetLoadRequest())).draining
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await two.say()
    assert from_rpc_error(refused.value).reason == "DRAINING"

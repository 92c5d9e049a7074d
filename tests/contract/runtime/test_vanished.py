"""Peers that are gone without a word: nothing waits for a signal that never comes."""

from __future__ import annotations

import asyncio

import grpc
from google.protobuf.duration_pb2 import Duration

from shared.pb.quire.v1 import control_pb2, inference_pb2_grpc
from tests.contract.runtime.conftest import generate, serve, tokens_of
from tests.support.load.clients import COMPACTED
from tests.support.load.relay import Relay
from tests.support.tiny_engine import Oracle

EACH = 50
MORE_TOKENS_THAN_TIME = 4000


async def test_pages_of_the_aborted_and_of_those_whose_peer_is_silent_come_back(tmp_path):
    """BR-120, a hundred times: half are aborted while they wait, half belong to a host that has lost its power."""
    async with serve(tmp_path) as served, Relay(served.runtime.address) as relay:
        await served.load(name="tiny")
        served.gate.close()
        async with grpc.aio.insecure_channel(relay.address) as silent:
            calls = []
            for number in range(EACH):
                request = generate([number, 7], MORE_TOKENS_THAN_TIME, kv=COMPACTED)
                request.run_timeout.CopyFrom(Duration(seconds=1))
                calls.append(inference_pb2_grpc.InferenceStub(silent).Generate(request))
            assert {(await call.read()).WhichOneof("event") for call in calls} == {"accepted"}
            relay.freeze()

            waiting = [served.inference.Generate(generate([7], request_id=f"waiting-{number}")) for number in range(EACH)]
            for number, call in enumerate(waiting):
                await call.read()
                assert (await served.control.Abort(control_pb2.AbortRequest(request_id=f"waiting-{number}"))).aborted
            served.gate.open()
            for call in waiting:
                assert [(await call.read()).WhichOneof("event") for _ in range(2)] == ["finished", "usage"]

            load = await served.until_ended(2 * EACH)
            assert (load.pages_leaked, load.requests_finished) == (0, 0)
            assert tokens_of(await served.events(generate([3, 1, 4]))) == Oracle().expected_tokens([3, 1, 4], 8)
            relay.tear()
            await asyncio.gather(*(call.code() for call in calls))

"""Many greedy streams at once from one client process: `python -m tests.bench.streams ADDRESS ENGINE < requests.json`.

A request is {"prompt": tokens, "prompt_len", "seed", "max_tokens", "budget", "interval", "delay_s", "leave_after"}; a client
that is to leave cancels its call after so many tokens. What comes back, in order, is {"sent", "arrivals": [[second, tokens],
...], "tokens", "reason", "error", "usage": {...}}; seconds of this process's clock.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict

from shared.pb.quire.v1 import inference_pb2_grpc
from tests.e2e.streams import greedy_request


async def follow(stub: inference_pb2_grpc.InferenceStub, engine: str, wanted: dict[str, Any]) -> dict[str, Any]:
    await asyncio.sleep(wanted.get("delay_s", 0.0))
    prompt = wanted.get("prompt") or random.Random(wanted["seed"]).choices(range(3, wanted["vocab"]), k=wanted["prompt_len"])
    kv = {"budget": wanted["budget"], "interval": wanted["interval"]} if wanted.get("budget") else {}
    seen: dict[str, Any] = {"sent": time.perf_counter(), "arrivals": [], "tokens": [], "reason": 0, "error": "", "usage": {}}
    try:
        call = stub.Generate(greedy_request(engine, prompt, wanted["max_tokens"], **kv))
        async for event in call:
            if wanted.get("leave_after") and len(seen["tokens"]) >= wanted["leave_after"]:
                call.cancel()
                return seen
            match event.WhichOneof("event"):
                case "delta":
                    seen["arrivals"].append([time.perf_counter(), len(event.delta.token_ids)])
                    seen["tokens"] += event.delta.token_ids
                case "finished":
                    seen["reason"] = event.finished.reason
                case "usage":
                    seen["usage"] = MessageToDict(event.usage, preserving_proto_field_name=True)
                case "error":
                    seen["error"] = str(event.error)
    except grpc.aio.AioRpcError as error:
        seen["error"] = f"{error.code().name}: {error.details()}"
    return seen


async def main() -> None:
    address, engine = sys.argv[1:3]
    requests = json.load(sys.stdin)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        results = await asyncio.gather(*(follow(stub, engine, wanted) for wanted in requests))
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    asyncio.run(main())

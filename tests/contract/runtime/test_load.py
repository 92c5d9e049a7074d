"""Many streams over real gRPC, with clients that vanish, stall, hurry, send garbage and exceed caps, and a drain in the middle.

The server is a process of its own, so that its memory, descriptors and tasks are its own. `QUIRE_STREAMS` says how many streams a
wave has (`make soak`: 500).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
from google.protobuf.duration_pb2 import Duration

from shared.pb.quire.v1 import control_pb2, control_pb2_grpc
from tests.contract.runtime.conftest import PAGED_ID
from tests.support.load.clients import Clients
from tests.support.load.relay import Relay
from tests.support.scrape import Scrape, scrape

STREAMS = int(os.environ.get("QUIRE_STREAMS", "48"))
STALL_AFTER_S, LONG_TOKENS = (2.0, 3000) if STREAMS < 100 else (4.0, 4000)
WORD_SIZE = 2000
SETTLE_S = 150.0
"""gRPC gives a connection two minutes to shake hands; those torn in the middle of that are closed then at the latest."""
OF_SCRAPES = 2
"""Descriptors of scrapes that have just been answered."""
MOST_GROWTH_BYTES = 24 << 20
"""Of the second wave over the first, which has filled every cache and arena there is: allocators keep a little here and there."""


@dataclass(frozen=True)
class Weight:
    """What a server holds when it is idle and nobody is connected."""

    pages_used: float
    pages_leaked: float
    requests: float
    tasks: float
    threads: float
    descriptors: float
    sockets: float
    resident_mib: float

    @classmethod
    def of(cls, seen: Scrape) -> Weight:
        return cls(
            seen("quire_runtime_kv_pages", state="exclusive") + seen("quire_runtime_kv_pages", state="shared"),
            seen("quire_runtime_kv_pages_leaked_total"),
            seen("quire_runtime_requests_running") + seen("quire_runtime_requests_waiting"),
            seen("inside_tasks"),
            seen("inside_threads"),
            seen("process_open_fds"),
            seen("inside_sockets"),
            round(seen("process_resident_memory_bytes") / (1 << 20), 1),
        )


@contextlib.asynccontextmanager
async def loaded_server(data: Path) -> AsyncIterator[dict[str, str]]:
    settings = {
        "QUIRE_DATA": str(data),
        "QUIRE_RUNTIME_ADDRESS": "127.0.0.1:0",
        "QUIRE_RUNTIME_METRICS_ADDRESS": "127.0.0.1:0",
        "QUIRE_RUNTIME_MAX_WAITING_REQUESTS": str(STREAMS // 2),
        "QUIRE_RUNTIME_STALL_AFTER_S": str(STALL_AFTER_S),
        "QUIRE_RUNTIME_DRAIN_S": "0",
        "QUIRE_RUNTIME_LOG_LEVEL": "warning",
    }
    command = (sys.executable, "-m", "tests.support.load.server", str(WORD_SIZE))
    process = await asyncio.create_subprocess_exec(*command, env=os.environ | settings, stdout=asyncio.subprocess.PIPE)
    try:
        yield json.loads(await process.stdout.readline())
        process.terminate()
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def settled(metrics: str, idle: Weight | None = None) -> Weight:
    """The weight once it is no more than when `idle`, memory and threads apart; or whatever it is after minutes."""
    deadline = asyncio.get_running_loop().time() + SETTLE_S
    while True:
        weight = Weight.of(await scrape(metrics))
        if idle is None or asyncio.get_running_loop().time() > deadline:
            return weight
        if weight.requests == 0 and weight.tasks <= idle.tasks and weight.sockets <= idle.sockets + OF_SCRAPES:
            return weight
        await asyncio.sleep(0.1)


def ended(seen: Scrape) -> float:
    return sum(seen("quire_runtime_requests_total", outcome=outcome) for outcome in ("finished", "cancelled", "failed"))


def refusals(tally: Counter[str]) -> Counter[str]:
    found: Counter[str] = Counter()
    for outcome, count in tally.items():
        if "refused" in outcome:
            found[outcome.split()[-1]] += count
    return found


async def test_nothing_is_left_behind_and_what_was_accepted_was_right(tmp_path):
    async with (
        loaded_server(tmp_path) as server,
        Relay(server["address"]) as relay,
        grpc.aio.insecure_channel(server["address"]) as channel,
    ):
        control, metrics = control_pb2_grpc.ControlStub(channel), server["metrics_address"]
        await control.LoadEngine(control_pb2.LoadEngineRequest(artifact_id=PAGED_ID, name="tiny", num_pages=65))
        clients = Clients(server["address"], relay, STALL_AFTER_S + 2, LONG_TOKENS, random.Random(STREAMS))
        idle = await settled(metrics)

        first = await clients.wave(STREAMS)
        before = await settled(metrics, idle)
        seen = await scrape(metrics)
        for reason, count in refusals(first).items():
            assert (
                sum(seen(n, **s) for n in ["quire_runtime_calls_total"] for s in seen.series(n) if s["outcome"] == reason) >= count
            )

        wave = asyncio.create_task(clients.wave(STREAMS))
        target = ended(seen) + STREAMS // 4
        while ended(await scrape(metrics)) < target:
            await asyncio.sleep(0.02)
        drained = await control.Drain(control_pb2.DrainRequest(deadline=Duration(nanos=300_000_000)))
        clients.hurry.set()
        second = await wave
        after = await settled(metrics, idle)
        seen = await scrape(metrics)

        print(f"\n{STREAMS} streams a wave; drain: {drained.finished} finished, {drained.aborted} aborted")
        for name, tally in (("first wave", first), ("second wave, drained", second)):
            print(f"{name}: " + ", ".join(f"{outcome} {count}" for outcome, count in sorted(tally.items())))
        for name, weight in (("idle", idle), ("before", before), ("after", after)):
            print(f"{name:>8}: {weight}")

        assert first.total() == second.total() == STREAMS
        # Of the first wave's readers some found the queue full, all others got every token.
        assert {o for o in first if o.startswith("reads")} <= {
            f"{k}: {o}" for k in ("reads", "reads_compacted") for o in ("right", "refused QUEUE_FULL")
        }
        assert first["reads: right"] > 0
        assert first["stalls: ended READER_STALLED"] > 0
        assert {outcome for outcome in first if outcome.startswith("leaves")} <= {"leaves: left", "leaves: refused QUEUE_FULL"}
        assert refusals(first).keys() <= {"QUEUE_FULL", "FIELD_OUT_OF_RANGE", "MODEL_NOT_FOUND", "KV_EXHAUSTED"}
        assert drained.aborted > 0
        assert sum(count for outcome, count in second.items() if outcome.endswith("DRAINING")) > 0
        assert refusals(second).keys() <= {"QUEUE_FULL", "FIELD_OUT_OF_RANGE", "MODEL_NOT_FOUND", "KV_EXHAUSTED", "DRAINING"}

        assert (after.pages_used, after.pages_leaked, after.requests) == (0, 0, 0)
        assert after.tasks <= idle.tasks
        assert after.sockets <= idle.sockets + OF_SCRAPES
        assert after.descriptors - after.sockets <= before.descriptors - before.sockets
        assert after.threads <= before.threads
        assert after.resident_mib - before.resident_mib < MOST_GROWTH_BYTES / (1 << 20)

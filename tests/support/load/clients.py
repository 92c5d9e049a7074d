"""Clients of every kind at once. Each says in a word what became of it; what must not happen raises."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import cache

import grpc

from shared.pb.quire.v1 import inference_pb2 as pb
from shared.pb.quire.v1 import inference_pb2_grpc
from shared.rpc.status import from_rpc_error
from tests.contract.runtime.conftest import generate
from tests.support.load.relay import Relay
from tests.support.tiny_engine import Oracle, sink_recent_rounds

BUDGET, INTERVAL, SINKS = 8, 16, 4
COMPACTED = pb.KVOptions(policy=pb.CompactionOptions(name="sink_recent", budget=BUDGET, interval=INTERVAL, sinks=SINKS))
SHORT = 24
PROMPTS, PROMPT_TAIL = 6, (7, 8, 9)
NARROW = [("grpc.http2.lookahead_bytes", 65536), ("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]
"""A client's channel that takes no more than 64 KiB ahead of its reader, and shares no connection."""
RETRYABLE = {"QUEUE_FULL", "DRAINING"}
GARBAGE = (b"\xff" * 64, b"\x0a\x7f", b"\x0a\x02\xff\xfe", b"\x80" * 4096)
OVER_CAPS = (
    generate([1], 2**32 - 1),
    generate(list(range(100)), 8),
    generate([251]),
    generate("w1 " * 5000),
    generate([1], stop=["x" * 100_000]),
    generate([1], sampling=pb.Sampling(top_p=float("nan"))),
    generate([1], engine="nobody"),
)


@cache
def expected(prompt: tuple[int, ...], count: int, *, compacted: bool) -> list[int]:
    rounds = sink_recent_rounds(len(prompt) + count, BUDGET, INTERVAL, SINKS) if compacted else []
    return Oracle().expected_tokens(prompt, count, rounds)


@dataclass
class Clients:
    """Channels go to `address` and, for those who vanish, to `relay`. A slow reader sleeps `stall_s`, or until `hurry` is set.

    `long` tokens take the server longer than it waits for a reader that has stalled.
    """

    address: str
    relay: Relay
    stall_s: float
    long: int
    random: random.Random
    tally: Counter[str] = field(default_factory=Counter)
    hurry: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        """The oracle answers before the clock runs: it would keep every reader of this process waiting."""
        for first in range(PROMPTS):
            expected((first, *PROMPT_TAIL), SHORT, compacted=False)
            expected((first, *PROMPT_TAIL), SHORT * 3, compacted=True)
        expected(PROMPT_TAIL, self.long, compacted=True)

    async def wave(self, streams: int) -> Counter[str]:
        """`streams` clients at once, a fixed mix of all kinds in an order of its own. Returns what became of them."""
        self.tally = Counter()
        kinds = [self.reads, self.reads, self.reads_compacted, self.leaves, self.vanishes, self.hurries, self.stalls, self.errs]
        chosen = [kinds[number % len(kinds)] for number in range(streams)]
        self.random.shuffle(chosen)
        async with contextlib.AsyncExitStack() as open_channels:
            direct = [await open_channels.enter_async_context(self._channel(self.address)) for _ in range(max(1, streams // 16))]
            torn = await open_channels.enter_async_context(self._channel(self.relay.address))
            vanished = asyncio.create_task(self._tear_now_and_then())
            try:
                async with asyncio.TaskGroup() as group:
                    for number, kind in enumerate(chosen):
                        group.create_task(self._one(kind, torn if kind == self.vanishes else direct[number % len(direct)]))
            finally:
                vanished.cancel()
        gc.collect()  # calls that were left are held by their own cycles, and hold their connections
        return self.tally

    def _channel(self, address: str) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(address, NARROW)

    async def _tear_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(0.3)
            self.relay.tear()

    async def _one(self, kind: Callable[[grpc.aio.Channel], Awaitable[str]], channel: grpc.aio.Channel) -> None:
        await asyncio.sleep(self.random.random() * 0.5)
        try:
            outcome = await kind(channel)
        except grpc.aio.AioRpcError as error:
            refusal = from_rpc_error(error)
            assert refusal.retryable == (refusal.reason in RETRYABLE), refusal
            assert not refusal.retryable or refusal.retry_after_s > 0, "a refusal that may be repeated says when"
            outcome = f"refused {refusal.reason}"
        self.tally[f"{kind.__name__}: {outcome}"] += 1

    # ---- kinds ----

    async def reads(self, channel: grpc.aio.Channel) -> str:
        prompt = self._prompt()
        return self._judge(await _all(channel, generate(prompt, SHORT)), prompt, SHORT, compacted=False)

    async def reads_compacted(self, channel: grpc.aio.Channel) -> str:
        prompt = self._prompt()
        return self._judge(await _all(channel, generate(prompt, SHORT * 3, kv=COMPACTED)), prompt, SHORT * 3, compacted=True)

    async def leaves(self, channel: grpc.aio.Channel) -> str:
        call = _stub(channel).Generate(generate(self._prompt(), SHORT))
        for _ in range(self.random.randrange(4)):
            await call.read()
        call.cancel()
        return "left"

    async def vanishes(self, channel: grpc.aio.Channel) -> str:
        """Its connection is torn sooner or later, mostly sooner than the stream ends."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            await _all(channel, generate(self._prompt(), self.long, kv=COMPACTED))
        return "vanished"

    async def hurries(self, channel: grpc.aio.Channel) -> str:
        """Cannot wait: a deadline of the server's, and one of the client's own."""
        prompt, request = self._prompt(), generate([], SHORT)
        request.token_ids.ids.extend(prompt)
        request.queue_timeout.FromMilliseconds(self.random.randrange(1, 400))
        return self._judge(await _all(channel, request), prompt, SHORT, compacted=False)

    async def stalls(self, channel: grpc.aio.Channel) -> str:
        """Reads one token, then nothing for long, then the rest."""
        call = _stub(channel).Generate(generate(PROMPT_TAIL, self.long, kv=COMPACTED))
        events = [await call.read(), await call.read()]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.hurry.wait(), self.stall_s)
        events += [event async for event in rest(call)]
        return self._judge(events, PROMPT_TAIL, self.long, compacted=True)

    async def errs(self, channel: grpc.aio.Channel) -> str:
        """Garbage, or a request over some cap; never accepted."""
        if self.random.random() < 0.5:
            data = self.random.choice(GARBAGE)
            await channel.unary_stream("/quire.v1.Inference/Generate")(data).read()
        else:
            await _all(channel, self.random.choice(OVER_CAPS))
        raise AssertionError("a bad request was accepted")

    # ---- judging ----

    def _prompt(self) -> tuple[int, ...]:
        """One of few, so that the oracle computes each once."""
        return (self.random.randrange(PROMPTS), *PROMPT_TAIL)

    def _judge(self, events: list[pb.GenerateResponse], prompt: tuple[int, ...], count: int, *, compacted: bool) -> str:
        """Every token that came is the right one; all of them if the stream ended well, and then it says so once."""
        right = expected(prompt, count, compacted=compacted)
        kinds = [event.WhichOneof("event") for event in events]
        tokens = list(_tokens(events))
        assert tokens == right[: len(tokens)], "wrong tokens"
        assert kinds[0] == "accepted", kinds
        if kinds[-1] == "error":
            assert len(tokens) < count
            return f"ended {events[-1].error.reason}"
        assert kinds[-2:] == ["finished", "usage"], kinds[-3:]
        assert len(tokens) == count
        return "right"


def _stub(channel: grpc.aio.Channel) -> inference_pb2_grpc.InferenceStub:
    return inference_pb2_grpc.InferenceStub(channel)


async def _all(channel: grpc.aio.Channel, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return [event async for event in rest(_stub(channel).Generate(request))]


async def rest(call: grpc.aio.UnaryStreamCall) -> AsyncIterator[pb.GenerateResponse]:
    while (event := await call.read()) is not grpc.aio.EOF:
        yield event


def _tokens(events: list[pb.GenerateResponse]) -> Iterator[int]:
    for event in events:
        if event.WhichOneof("event") == "delta":
            yield from event.delta.token_ids

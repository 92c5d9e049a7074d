"""What the latency histograms count, on a clock that a test turns."""

from __future__ import annotations

from runtime_service.core.params import SamplingParams
from tests.support.serving import request, run, serving, submit
from tests.support.tiny_engine import TinyEngine


class Clock:
    """Moves on by a second at each engine step."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def tick(self, _: object) -> None:
        self.now += 1.0


def timed(num_pages: int = 80):
    clock, engine = Clock(), TinyEngine()
    engine.on_run = clock.tick
    return clock, serving(engine, num_pages, clock=clock)


def test_a_request_from_submission_to_its_end() -> None:
    """Waits 5 s, two prefill chunks of 16, then a token a second."""
    clock, loop = timed()
    submit(loop, request(range(20), 4))
    clock.now += 5.0
    run(loop)
    seen = loop.load().engines[0].latencies
    assert (seen.queue.count, seen.queue.sum) == (1, 5.0)
    assert (seen.prefill.count, seen.prefill.sum) == (1, 2.0)
    assert (seen.first_token.count, seen.first_token.sum) == (1, 7.0)
    assert (seen.inter_token.count, seen.inter_token.sum) == (3, 3.0)
    assert (seen.decode.count, seen.decode.sum) == (1, 3.0)


def test_once_a_request_whatever_becomes_of_it() -> None:
    """BR-173: of 10 requests 3 are preempted, 2 end before their first token and 2 after it."""
    _, loop = timed()
    streams = submit(loop, *(request([n], 20, request_id=f"r{n}") for n in range(10)))
    loop.abort("r0")
    loop.abort("r1")
    for _ in range(12):
        loop.turn()
    assert all(stream.tokens() for stream in streams[2:])
    for stream in streams[2:5]:
        loop._sessions["tiny"].scheduler.preempt(stream.sequences[0])
    loop.abort("r8")
    loop.abort("r9")
    run(loop)
    assert [stream.usage.preemptions for stream in streams[2:8]] == [1, 1, 1, 0, 0, 0]
    seen = loop.load().engines[0]
    assert (seen.requests_finished, seen.requests_cancelled) == (6, 4)
    counts = [h.count for h in (seen.latencies.first_token, seen.latencies.prefill, seen.latencies.queue, seen.latencies.decode)]
    assert counts == [8, 8, 8, 8]
    assert seen.latencies.inter_token.count == seen.generated_tokens - 8


def test_samples_have_gaps_of_their_own_and_one_first_token() -> None:
    _, loop = timed()
    submit(loop, request([1, 2], 3, sampling=SamplingParams(temperature=1.0, n=3)))
    run(loop)
    seen = loop.load().engines[0].latencies
    assert seen.first_token.count == 1
    assert (seen.inter_token.count, seen.inter_token.sum) == (6, 6.0)

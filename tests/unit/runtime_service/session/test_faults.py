"""A fault at any seam costs those it was for: their streams end once with an error, pages come back, others say their own."""

from __future__ import annotations

import math

import pytest
import torch

from runtime_service.compaction.policies.knorm import KNorm
from runtime_service.core.params import CompactionParams
from runtime_service.core.sequence import Status
from runtime_service.device_sampling import DrawnTokens
from runtime_service.kv.pool import KVPool
from runtime_service.loop import ServingLoop
from runtime_service.streaming.events import Failure
from shared.errors import InternalError
from tests.support.serving import RecordingStream, request, run, serving, submit, wait_until
from tests.support.tiny_engine import Oracle, TinyEngine

KNORM = CompactionParams("knorm", budget=8, interval=4, sinks=2)


class DeviceLost(RuntimeError):
    pass


def fail(*_: object) -> None:
    raise DeviceLost


def assert_failed(loop: ServingLoop, *streams: RecordingStream) -> None:
    for stream in streams:
        assert isinstance(stream.events[-1], Failure)
        assert isinstance(stream.error, InternalError), stream.error
        assert stream.after_end == []
    load = loop.load().engines[0]
    assert (load.pages_free, load.pages_leaked, load.requests_failed) == (load.pages_total, 0, len(streams))
    assert loop._alive == {}


def test_keys_that_are_no_numbers_cost_their_own_request_and_no_neighbour() -> None:
    """Between two chunks of a prompt a round looks at keys long before anybody looks at logits."""

    class Poisoned(TinyEngine):
        def run(self, inputs, pool):
            logits = super().run(inputs, pool)
            for ids, table in zip(inputs.input_ids.tolist(), inputs.block_table.tolist(), strict=True):
                if 77 in ids:
                    pool.by_page(0)[table[0], 0, 0, 0] = torch.nan
            return logits

    loop = serving(Poisoned(), num_pages=60)
    before, lost, beside = submit(
        loop, request([1, 2, 3], 20), request([77] * 30, 5, compaction=KNORM), request([5] * 11, 20, compaction=KNORM)
    )
    run(loop)
    assert "NaN" in lost.error.message
    assert before.tokens() == Oracle().expected_tokens([1, 2, 3], 20)
    assert beside.usage.compaction_rounds > 1
    assert_failed(loop, lost)


def test_a_policy_that_fails_costs_the_sequence_it_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = serving(TinyEngine(), num_pages=60)
    lost, beside = submit(loop, *(request([n, 7], 20, compaction=KNORM) for n in (1, 2)))
    genuine, calls = KNorm.score, []

    def score(policy, view):
        calls.append(view)
        return fail() if len(calls) == 1 else genuine(policy, view)

    monkeypatch.setattr(KNorm, "score", score)
    run(loop)
    assert beside.usage.compaction_rounds == 3
    assert_failed(loop, lost)


def test_a_mover_that_fails_costs_its_cohort(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = serving(TinyEngine(), num_pages=60)
    untouched, *cohort = submit(
        loop, request([3], 20), *(request([n, 7], 20, compaction=KNORM) for n in (1, 2)), request(range(6), 20, compaction=KNORM)
    )
    later = cohort.pop()
    executor = loop._sessions["tiny"].compactor._executor
    genuine = executor.execute

    def execute(plans):
        monkeypatch.undo()
        genuine(plans)
        fail()

    monkeypatch.setattr(executor, "execute", execute)
    while not any(stream.is_ended for stream in (later, *cohort)):
        loop.turn()
    lost = [stream for stream in (later, *cohort) if stream.is_ended]
    run(loop)
    assert untouched.tokens() == Oracle().expected_tokens([3], 20)
    assert 0 < len(lost) < 3
    assert_failed(loop, *lost)


def test_a_tokenizer_that_fails_over_a_token_costs_the_request_that_got_it() -> None:
    class Panic(BaseException):
        pass

    loop = serving(TinyEngine(), num_pages=60)
    vocabulary = loop._sessions["tiny"].vocabulary
    (poison,) = set(Oracle().expected_tokens([1, 2], 4)[3:]) - set(Oracle().expected_tokens([3], 12))
    tokenizer = vocabulary._tokenizer

    class Panicking:
        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def decode(self, ids, **options):
            if poison in ids:
                raise Panic
            return tokenizer.decode(ids, **options)

    vocabulary._tokenizer = Panicking()
    lost, other = submit(loop, request([1, 2], 12), request([3], 12))
    run(loop)
    assert str(poison) in lost.error.message
    assert other.tokens() == Oracle().expected_tokens([3], 12)
    assert_failed(loop, lost)


@pytest.mark.parametrize("when", ["while it speaks", "when it is cancelled"])
def test_output_that_cannot_be_made_costs_its_request(when: str) -> None:
    loop = serving(TinyEngine(), num_pages=60)
    lost, other = submit(loop, request([1, 2], 12, request_id="lost"), request([3], 12))
    for _ in range(4):
        loop.turn()
    output = next(iter(loop._alive["lost"].samples)).output
    output._detokenizer = None
    if when == "when it is cancelled":
        loop.abort("lost")
    run(loop)
    assert other.tokens() == Oracle().expected_tokens([3], 12)
    assert_failed(loop, lost)


def test_tokens_that_never_arrive_are_the_end_of_whoever_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Preempted with a token on its way, a sequence cannot be admitted again: nor could anybody behind it."""
    loop = serving(TinyEngine(runs_ahead=True, page_size=4), num_pages=10)
    first, second = submit(loop, request([1, 2, 3], 16), request([9, 8, 7], 16))
    (waiting,) = second.sequences
    genuine = DrawnTokens.wait

    def wait(drawn):
        return fail() if waiting.unseen and waiting.status is Status.WAITING else genuine(drawn)

    monkeypatch.setattr(DrawnTokens, "wait", wait)
    run(loop)
    assert_failed(loop, first, second)
    (after,) = submit(loop, request([5], 9))
    run(loop)
    assert after.tokens() == Oracle().expected_tokens([5], 9)


def test_a_page_that_cannot_be_had_at_admission_ends_who_wanted_it_and_not_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = serving(TinyEngine(), num_pages=10)
    lost, other = submit(loop, request([1, 2, 3], 5), request([9, 8, 7], 5))
    monkeypatch.setattr(loop._sessions["tiny"].allocator, "try_allocate", fail)
    loop.turn()
    monkeypatch.undo()
    run(loop)
    assert other.tokens() == Oracle().expected_tokens([9, 8, 7], 5)
    assert_failed(loop, lost)


def test_a_device_that_is_lost_ends_the_loop_and_one_that_goes_on_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is lost every step to come would fail as well, and liveness would never tell."""
    engine = TinyEngine()
    loop = serving(engine, num_pages=40)
    loop.start()
    try:
        engine.on_run = fail
        (lost,) = submit(loop, request([1], 3))
        wait_until(lambda: lost.is_ended)
        assert loop.stalled_for_s() == 0.0
        monkeypatch.setattr(KVPool, "check_device", fail)
        (lost,) = submit(loop, request([1], 3))
        wait_until(lambda: loop.stalled_for_s() == math.inf)
        assert isinstance(lost.error, InternalError)
        with pytest.raises(InternalError, match="DeviceLost"):
            submit(loop, request([1], 3))
    finally:
        loop.stop()
    assert engine.closed

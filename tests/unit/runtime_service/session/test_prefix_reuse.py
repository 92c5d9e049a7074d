"""Requests that begin alike: what the second one computes, and that it gets the tokens it would have got alone."""

from __future__ import annotations

import time
from collections.abc import Iterable

import pytest
import torch

from runtime_service.core.params import CompactionParams, SamplingParams
from runtime_service.loop import ServingLoop
from runtime_service.session import flight as flight_module
from shared.errors import InternalError
from shared.kernels.compaction.modes import Mode
from shared.kv_spec import Layout
from tests.support.drafted import drafted_serving
from tests.support.prefixes import Colliding, check_prefixes
from tests.support.serving import RecordingStream, request, rounds_of, run, serving, submit
from tests.support.tiny_engine import Oracle, TinyEngine, TinyModel, tiny_tokenizer

ROUNDS = CompactionParams("sink_recent", 12, 6, 2)


def answer(loop: ServingLoop, prompt: Iterable[int], max_tokens: int = 4, **options: object) -> RecordingStream:
    (stream,) = submit(loop, request(prompt, max_tokens, **options))
    run(loop)
    return stream


def assert_law(loop: ServingLoop) -> None:
    """Nothing is owned, and what is cached holds what it says."""
    session = loop._sessions["tiny"]
    session.allocator.check_integrity()
    load = loop.load().engines[0]
    assert (load.pages_free, load.pages_leaked) == (load.pages_total, 0)
    check_prefixes(session, session._engine.model)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("length", [31, 32, 33])
def test_a_prompt_asked_again_is_computed_from_its_last_whole_page_on(length: int, window: int | None, ahead: bool) -> None:
    """BR-042: never all of it, or there would be no logits."""
    engine, steps = TinyEngine(TinyModel(window=window), page_size=16, runs_ahead=ahead), []
    engine.on_run = lambda inputs: steps.append((inputs.write_start.tolist(), inputs.batch * inputs.query_len))
    loop = serving(engine, num_pages=20)
    first = answer(loop, range(length))
    alone, steps[:] = list(steps), []
    second = answer(loop, range(length))
    cached = (length - 1) // 16 * 16
    assert first.tokens() == second.tokens() == Oracle(engine.model).expected_tokens(range(length), 4)
    assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, cached)
    assert sum(count for _, count in alone) - sum(count for _, count in steps) == cached
    assert steps[0][0] == [cached]
    assert (loop.load().engines[0].prefix_hits, loop.load().engines[0].prefix_queries) == (cached, 2 * length)
    assert_law(loop)


def test_a_conversation_goes_on_from_the_answer() -> None:
    loop = serving(TinyEngine(), num_pages=40)
    first = answer(loop, range(10), 12)
    prompt = [*range(10), *first.tokens(), 1, 2]
    second = answer(loop, prompt)
    assert second.usage.cached_tokens == 20  # the 22nd was never computed, nor was the page of the 21st filled
    assert second.tokens() == Oracle().expected_tokens(prompt, 4)


def test_a_burst_of_one_prompt_is_computed_by_those_in_front() -> None:
    """Admitted together, the others look again before their own first chunk."""
    engine, computed = TinyEngine(), []
    engine.on_run = lambda inputs: computed.append(inputs.batch * inputs.query_len)
    loop = serving(engine, num_pages=80)
    streams = submit(loop, *(request(range(40), 2) for _ in range(6)))
    run(loop)
    assert [stream.tokens() for stream in streams] == [Oracle().expected_tokens(range(40), 2)] * 6
    assert [stream.usage.cached_tokens for stream in streams] == [0, 0, 36, 36, 36, 36]
    assert sum(computed) == 2 * 40 + 4 * 4 + 6
    assert_law(loop)


def test_tenants_do_not_see_each_other_and_equal_hashes_are_no_hits() -> None:
    """BR-040."""
    loop = serving(TinyEngine(), num_pages=40)
    for salt in ("a", "b", ""):
        assert answer(loop, range(20), cache_salt=salt).usage.cached_tokens == 0
    assert answer(loop, range(20), cache_salt="b").usage.cached_tokens == 16
    one, other = ([Colliding(token) for token in range(start, start + 16)] for start in (100, 200))
    assert answer(loop, one).usage.cached_tokens == 0
    missed = answer(loop, other)
    assert (missed.usage.cached_tokens, missed.tokens()) == (0, Oracle().expected_tokens(range(200, 216), 4))


def test_prompts_that_part_in_the_middle_of_a_page_leave_an_exact_account() -> None:
    """BR-033."""
    loop = serving(TinyEngine(), num_pages=40)
    prompts = [[*range(10), *tail] for tail in ([100] * 8, [101] * 8)]
    streams = submit(loop, *(request(prompt, 4) for prompt in prompts))
    run(loop)
    assert [stream.tokens() for stream in streams] == [Oracle().expected_tokens(prompt, 4) for prompt in prompts]
    load = loop.load().engines[0]
    assert (load.pages_cached, load.pages_free, load.pages_leaked) == (2 + 2 * 3, 39, 0)
    assert_law(loop)


@pytest.mark.parametrize("ahead", [False, True])
def test_of_fifty_equal_prompts_half_cancelled_at_any_moment_all_come_back_whole(ahead: bool) -> None:
    """BR-036: what a cancelled one has not written is found by nobody."""
    loop = serving(TinyEngine(runs_ahead=ahead, profiles=("decode=8x1", "prefill=2x6")), num_pages=60)
    prompt, expected = list(range(22)), Oracle().expected_tokens(range(22), 6)
    streams = submit(loop, *(request(prompt, 6, request_id=f"r{i}") for i in range(50)))
    for i in range(0, 50, 2):
        loop.abort(streams[i].sequences[0].request.request_id)
        loop.turn()
    run(loop)
    assert all(stream.tokens() == expected[: len(stream.tokens())] for stream in streams)
    assert [stream.tokens() for stream in streams[1::2]] == [expected] * 25
    again = submit(loop, *(request(prompt, 6) for _ in range(50)))
    run(loop)
    assert [stream.tokens() for stream in again] == [expected] * 50
    assert_law(loop)


def test_cached_pages_are_taken_before_anybody_waits_or_is_preempted() -> None:
    loop = serving(TinyEngine(), num_pages=1 + 12)
    answer(loop, range(40), 8)
    assert loop.load().engines[0].pages_cached == 11
    steps = loop.load().engines[0].steps
    other = answer(loop, range(100, 140), 8)
    load = loop.load().engines[0]
    assert other.tokens() == Oracle().expected_tokens(range(100, 140), 8)
    assert (load.preemptions, load.steps - steps) == (0, 3 + 7)
    assert_law(loop)


def test_a_preempted_sequence_goes_on_from_what_is_left_of_its_own_pages() -> None:
    engine, starts = TinyEngine(), []
    loop = serving(engine, num_pages=40)
    (stream,) = submit(loop, request(range(30), 12))
    for _ in range(8):
        loop.turn()
    loop._sessions["tiny"].scheduler.preempt(stream.sequences[0])
    engine.on_run = lambda inputs: starts.append(inputs.write_start.tolist())
    run(loop)
    assert starts[0] == [36]  # all it had computed
    assert stream.tokens() == Oracle().expected_tokens(range(30), 12)
    assert stream.usage.cached_tokens == 0  # nobody else computed it
    assert_law(loop)


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("policy", ["sink_recent", "knorm_per_layer_head"])
def test_rounds_leave_what_they_found_to_others(policy: str, mode: Mode) -> None:
    """The first round of each writes to copies: the prompt's pages stay what they are, and nothing compacted is offered."""
    loop = serving(TinyEngine(), num_pages=60)
    compaction = CompactionParams(policy, 12, 6, 2, mode)
    first = answer(loop, range(30), 30, compaction=compaction)
    assert first.usage.compaction_rounds > 3
    assert_law(loop)
    for options, cached in (({}, 16), ({"compaction": compaction}, 16), ({"compaction": compaction}, 16), ({}, 28)):
        stream = answer(loop, range(30), 30, **options)
        assert stream.usage.cached_tokens == cached
        assert stream.tokens() == Oracle().expected_tokens(range(30), 30, rounds_of(stream.sequences[0]))
        assert_law(loop)
    assert first.usage.pages_freed == answer(loop, range(30), 30, compaction=compaction).usage.pages_freed


def test_where_no_page_is_free_for_a_copy_the_cache_gives_way_and_nobody_is_preempted() -> None:
    """Five pages are all that a sequence of budget 12 and interval 6 ever holds."""
    loop = serving(TinyEngine(), num_pages=1 + 5)
    stream = answer(loop, range(18), 30, compaction=ROUNDS)
    assert stream.tokens() == Oracle().expected_tokens(range(18), 30, rounds_of(stream.sequences[0]))
    assert (stream.usage.preemptions, stream.usage.compaction_rounds) == (0, 5)
    assert_law(loop)


@pytest.mark.parametrize("num_pages", [6, 8, 10])
def test_compacted_requests_that_share_what_they_must_copy_end_all_the_same(num_pages: int) -> None:
    """Their rounds come at the same length, their pages are the same: the lowest in rank waits until the others are done."""
    loop = serving(TinyEngine(), num_pages=1 + num_pages)
    streams = submit(loop, *(request([*range(17), last], 20, compaction=ROUNDS) for last in (100, 101, 102)))
    run(loop)
    for stream, last in zip(streams, (100, 101, 102), strict=True):
        assert stream.tokens() == Oracle().expected_tokens([*range(17), last], 20, rounds_of(stream.sequences[0]))
    assert streams[0].usage.preemptions == 0
    assert_law(loop)


def test_a_failed_step_leaves_nothing_to_go_on_from() -> None:
    engine = TinyEngine()
    loop = serving(engine, num_pages=40)
    answer(loop, range(20))

    def fail(inputs: object) -> None:
        raise RuntimeError("device lost")

    engine.on_run = fail
    assert isinstance(answer(loop, [9, 8, 7]).error, InternalError)
    engine.on_run = None
    assert loop.load().engines[0].pages_cached == 0
    again = answer(loop, range(20))
    assert (again.usage.cached_tokens, again.tokens()) == (0, Oracle().expected_tokens(range(20), 4))


def test_tokens_that_came_to_nothing_are_nobodys_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """BR-036. Logits that are no numbers may come of what the pages hold: they are not offered again, found or computed."""
    loop = serving(TinyEngine(), num_pages=40)
    answer(loop, range(20))
    with monkeypatch.context() as patched:
        patched.setattr(flight_module, "sample", lambda logits, states: [InternalError("not finite") for _ in states])
        assert isinstance(answer(loop, range(30)).error, InternalError)
    assert answer(loop, range(30)).usage.cached_tokens == 0
    assert_law(loop)


def test_samples_that_start_late_go_on_from_the_first() -> None:
    """n samples of one prompt, of which a batch of 2 takes no more."""
    engine, computed = TinyEngine(profiles=("decode=2x1", "prefill=2x16")), []
    engine.on_run = lambda inputs: computed.append(inputs.batch * inputs.query_len)
    loop = serving(engine, num_pages=40)
    stream = answer(loop, range(33), 3, sampling=SamplingParams(temperature=0.0, n=4))
    assert [stream.tokens(index) for index in range(4)] == [Oracle().expected_tokens(range(33), 3)] * 4
    assert stream.usage.cached_tokens == 0
    assert sum(computed) == 33 + 2 * 1 + 4 * 2


def test_an_engine_unloaded_takes_its_cache_with_it() -> None:
    loop = serving(TinyEngine(), num_pages=40)
    loop.start()
    try:
        for _ in range(2):
            (stream,) = submit(loop, request(range(20), 4))
            while not stream.is_ended:
                time.sleep(0.001)
            assert stream.usage.cached_tokens == 0
            loop.remove_engine("tiny", grace_s=10)
            loop.add_engine("tiny", TinyEngine(), tiny_tokenizer(), 40)
    finally:
        loop.stop()


def test_where_pages_cannot_be_shared_nothing_is_looked_for() -> None:
    """A page of a linear pool is a whole cache; a draft's cache has nothing of what its target skips; and it can be turned off."""
    linear = serving(TinyEngine(layout=Layout.LINEAR), num_pages=4)
    drafted, _, writer = drafted_serving(TinyEngine(), num_pages=40)
    off = ServingLoop(max_waiting=8)
    off.add_engine("tiny", TinyEngine(), tiny_tokenizer(), 40, prefix_caching=False)
    for loop in (linear, drafted, off):
        for _ in range(2):
            stream = answer(loop, range(20))
            assert (stream.usage.cached_tokens, stream.tokens()) == (0, Oracle().expected_tokens(range(20), 4))
        load = loop.load().engines[0]
        assert (load.prefix_queries, load.prefix_hits, load.pages_cached) == (0, 0, 0)
    writer.check()


def test_a_copied_page_is_the_rounds_own() -> None:
    """The bytes of every page that was found stay what they were while a compacted sequence goes on behind its rounds."""
    loop = serving(TinyEngine(), num_pages=60)
    answer(loop, range(30))
    session = loop._sessions["tiny"]
    before = {page: session.pool.by_page(1)[page].clone() for page in session.allocator._prefixes.idle}
    (stream,) = submit(loop, request(range(30), 40, compaction=ROUNDS))
    for _ in range(30):
        loop.turn()
    assert stream.sequences[0].is_compacted
    assert all(torch.equal(session.pool.by_page(1)[page], held) for page, held in before.items())
    run(loop)

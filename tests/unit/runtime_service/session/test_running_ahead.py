"""The session one step ahead of what it has seen: the same tokens, rounds and pages as step by step.

What happens in any order is tried by tests/property/runtime_service/test_serving_machine.py, whose engines run ahead or not.
"""

from __future__ import annotations

import pytest
import torch

from runtime_service.core.params import CompactionParams, SamplingParams
from runtime_service.engine.engine import EngineInputs
from runtime_service.session.flight import Flight
from runtime_service.session.inputs import take_ids
from runtime_service.streaming.events import FinishReason
from tests.support.serving import request, rounds_of, run, serving, submit
from tests.support.tiny_engine import Oracle, TinyEngine, TinyModel

PROMPTS = [[1, 2, 3], [7] * 20, [5], list(range(30, 47)), [9, 8]]
ROUNDS = CompactionParams(policy="sink_recent", budget=8, interval=4, sinks=2)


def ahead(**options: object) -> TinyEngine:
    return TinyEngine(runs_ahead=True, **options)


def test_a_mix_gives_each_its_own_tokens_and_wastes_no_step_on_known_lengths() -> None:
    """A request that ends by its length has no row in the step after: its last token is never computed."""
    engine, computed = ahead(), []
    engine.on_run = lambda inputs: computed.append(inputs.batch * inputs.query_len)
    loop = serving(engine, num_pages=120)
    streams = submit(loop, *(request(prompt, 12) for prompt in PROMPTS))
    run(loop)
    oracle = Oracle()
    assert [stream.tokens() for stream in streams] == [oracle.expected_tokens(prompt, 12) for prompt in PROMPTS]
    assert sum(computed) == sum(len(prompt) + 11 for prompt in PROMPTS)
    assert all(stream.finish().reason is FinishReason.LENGTH for stream in streams)


def test_the_next_step_is_launched_before_the_last_one_is_read() -> None:
    """When a decode step starts, the reader has at most what came before the step that precedes it."""
    engine = ahead()
    loop = serving(engine, num_pages=40)
    seen: list[int] = []
    (stream,) = submit(loop, request([1, 2, 3], 6))
    engine.on_run = lambda inputs: seen.append(len(stream.tokens()))
    run(loop)
    assert seen == [0, 0, 1, 2, 3, 4]
    assert len(stream.tokens()) == 6


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_readers_are_released_behind_a_launch_or_when_nothing_is_in_flight(
    runs_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their work falls into the wait for the device; a step that is not in flight yet is prepared without them."""
    engine = TinyEngine(runs_ahead=runs_ahead)
    loop, order = serving(engine, num_pages=40), []
    released = loop.readers.release
    (session,) = loop._sessions.values()
    monkeypatch.setattr(loop.readers, "release", lambda: (order.append("release"), released()))
    monkeypatch.setattr(session, "_deliver", loop.readers.release)
    land = Flight.land
    monkeypatch.setattr(Flight, "land", lambda flight: (order.append("wait"), land(flight))[1])
    engine.on_run = lambda inputs: order.append("launch")
    submit(loop, request([1, 2, 3], 4))
    run(loop)
    behind = ["launch", "release", "wait"]
    expected = ["launch", *behind * 3, "release", "wait"] if runs_ahead else [*behind, "release"] * 4
    assert order[: len(expected)] == expected
    assert order[-1] == "release", "nobody is left waiting"


def test_rounds_run_at_the_same_lengths() -> None:
    seen = []
    for runs_ahead in (False, True):
        loop = serving(TinyEngine(runs_ahead=runs_ahead), num_pages=60)
        streams = submit(loop, *(request(prompt, 30, compaction=ROUNDS) for prompt in PROMPTS[:3]))
        run(loop)
        seen.append([(s.tokens(), s.usage.compaction_rounds, rounds_of(s.sequences[0])) for s in streams])
    assert seen[0] == seen[1]
    for prompt, (tokens, count, rounds) in zip(PROMPTS, seen[1], strict=False):
        assert tokens == Oracle().expected_tokens(prompt, 30, rounds)
        assert count == len(rounds) > 4


def test_an_end_nobody_could_know_costs_one_row_and_no_page() -> None:
    expected = Oracle().expected_tokens([1, 2, 3], 20)
    stop = expected[5]
    first = expected.index(stop)
    loop = serving(ahead(), num_pages=40)
    (stream,) = submit(loop, request([1, 2, 3], 20, stop_token_ids=[stop]))
    run(loop)
    assert stream.tokens() == expected[: first + 1]
    assert stream.usage.generated_tokens == first + 1
    (load,) = loop.load().engines
    assert (load.pages_free, load.pages_leaked) == (load.pages_total, 0)


def test_preempted_with_a_token_on_its_way_it_is_recomputed_with_it() -> None:
    """Two sequences that cannot both grow: the lower one gives way, more than once, and still says its own."""
    loop = serving(ahead(page_size=4), num_pages=10)
    streams = submit(loop, *(request(prompt, 16) for prompt in ([1, 2, 3], [9, 8, 7])))
    run(loop)
    (load,) = loop.load().engines
    assert load.preemptions > 0
    assert [s.tokens() for s in streams] == [Oracle().expected_tokens(p, 16) for p in ([1, 2, 3], [9, 8, 7])]


@pytest.mark.parametrize("num_pages", [6, 7, 8, 9])
def test_preempted_with_its_last_token_on_its_way_it_ends_with_it(num_pages: int) -> None:
    """Whatever the length of the lower one: for some, the page the other grows by is taken while only the last token is awaited."""
    for length in range(1, 14):
        loop = serving(ahead(page_size=4), num_pages=num_pages)
        streams = submit(loop, request([1, 2, 3], 14), request([9, 8, 7], length))
        run(loop)
        assert [s.tokens() for s in streams] == [
            Oracle().expected_tokens([1, 2, 3], 14),
            Oracle().expected_tokens([9, 8, 7], length),
        ]
        (load,) = loop.load().engines
        assert (load.pages_free, load.requests_finished) == (load.pages_total, 2)


@pytest.mark.parametrize("sampling", [{"n": 3}, {"logprobs": 2}, {"repetition_penalty": 1.2}])
def test_seeded_requests_say_the_same_as_step_by_step(sampling: dict[str, object]) -> None:
    """Those that need the host's sampler fly with others that do not."""
    wanted = SamplingParams(temperature=1.0, seed=5, **sampling)
    said = []
    for runs_ahead in (False, True):
        loop = serving(TinyEngine(TinyModel(), runs_ahead=runs_ahead), num_pages=120)
        streams = submit(loop, request([4, 5, 6], 10, sampling=wanted), request([3] * 9, 10))
        run(loop)
        said.append([stream.tokens(index) for stream in streams for index in range(stream.sequences[-1].index + 1)])
        assert all(rounds_of(sequence) == [] for stream in streams for sequence in stream.sequences)
    assert said[0] == said[1]


def test_tokens_the_device_holds_are_put_where_they_belong() -> None:
    def inputs(ids: list[int]) -> EngineInputs:
        rows = torch.zeros(len(ids), dtype=torch.int32)
        return EngineInputs("decode", torch.tensor(ids, dtype=torch.int32)[:, None], rows[:, None], rows, rows, rows[:, None])

    held = torch.tensor([70, 71, 72], dtype=torch.int32)
    assert take_ids(inputs([0, 0]), {0: 0, 1: 1}, held).input_ids.tolist() == [[70], [71]]
    mixed = take_ids(inputs([0, 8, 0, 9]), {0: 2, 2: 0}, held).input_ids
    assert mixed.tolist() == [[72], [8], [70], [9]]
    assert mixed.dtype is torch.int32

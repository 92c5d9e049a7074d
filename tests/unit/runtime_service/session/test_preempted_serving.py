"""Preemption by recompute: what comes out is what would have come out without it."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from runtime_service.core.params import CompactionParams, SamplingParams
from runtime_service.loop import ServingLoop
from runtime_service.sampling import SamplerState, sample
from shared.kernels.compaction.modes import Mode
from shared.kv_spec import Layout
from tests.support.serving import RecordingStream, request, rounds_of, run, serving, submit
from tests.support.tiny_engine import VOCAB, Oracle, TinyEngine, TinyModel


def preempt(loop: ServingLoop, stream: RecordingStream) -> None:
    loop._sessions["tiny"].scheduler.preempt(stream.sequences[0])


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("policy", [None, "sink_recent", "knorm"])
def test_preempted_after_any_step_the_tokens_and_the_rounds_are_the_same(
    layout: Layout, window: int | None, policy: str | None
) -> None:
    """The recomputed cache goes through the rounds it went through before, with the decisions of then."""
    model = TinyModel(window=window)
    compaction = policy and CompactionParams(policy, 12, 6, 2)
    undisturbed = serving(TinyEngine(model, layout=layout), num_pages=40)
    (reference,) = submit(undisturbed, request(range(20), 24, compaction=compaction))
    turns = run(undisturbed)
    expected_rounds = rounds_of(reference.sequences[0])
    assert reference.tokens() == Oracle(model).expected_tokens(range(20), 24, expected_rounds)

    for at in range(1, turns, 7):
        loop = serving(TinyEngine(model, layout=layout), num_pages=40)
        (stream,) = submit(loop, request(range(20), 24, compaction=compaction))
        for _ in range(at):
            loop.turn()
        preempt(loop, stream)
        run(loop)
        assert stream.tokens() == reference.tokens()
        assert rounds_of(stream.sequences[0]) == expected_rounds
        assert stream.usage.preemptions == 1
        assert (stream.usage.compaction_rounds, stream.usage.tokens_evicted) == (
            reference.usage.compaction_rounds,
            reference.usage.tokens_evicted,
        )
        assert loop.load().engines[0].pages_free == 39


@pytest.mark.parametrize(
    ("policy", "mode"), [("knorm", Mode.ORDERED), ("knorm", Mode.HOLE_FILLING), ("knorm_per_layer_head", Mode.HOLE_FILLING)]
)
def test_preempted_again_and_again_in_the_middle_of_its_own_recomputation(policy: str, mode: Mode) -> None:
    loop = serving(TinyEngine(), num_pages=40)
    (stream,) = submit(loop, request(range(20), 60, compaction=CompactionParams(policy, 12, 6, 2, mode)))
    for turns in (30, 3, 5, 9, 2, 14, 1):
        for _ in range(turns):
            loop.turn()
        preempt(loop, stream)
    run(loop)
    assert stream.tokens() == Oracle().expected_tokens(range(20), 60, rounds_of(stream.sequences[0]))
    assert stream.usage.preemptions == 7


def test_a_random_draw_is_not_repeated_by_a_preemption() -> None:
    drawn = SamplingParams(temperature=1.0, seed=3, presence_penalty=0.5)
    loop = serving(TinyEngine(), num_pages=40)
    (reference,) = submit(loop, request(range(5), 25, sampling=drawn))
    run(loop)
    (stream,) = submit(loop, request(range(5), 25, sampling=drawn))
    for _ in range(9):
        loop.turn()
    preempt(loop, stream)
    run(loop)
    assert stream.tokens() == reference.tokens()


def test_forked_samples_remember_rounds_of_their_own() -> None:
    """They share those of the prompt and then differ; the second is preempted and replays its own."""
    drawn = SamplingParams(temperature=1.0, seed=4, n=2)
    loop = serving(TinyEngine(), num_pages=60)
    (stream,) = submit(loop, request(range(30), 40, sampling=drawn, compaction=CompactionParams("knorm", 12, 6, 2)))
    for _ in range(30):
        loop.turn()
    loop._sessions["tiny"].scheduler.preempt(stream.sequences[1])
    run(loop)
    rounds = [rounds_of(sequence) for sequence in stream.sequences]
    common = [round_ for round_ in rounds[0] if round_.at <= 30]
    assert common
    assert rounds[1][: len(common)] == common
    assert rounds[0] != rounds[1]
    for index in range(2):
        sampler = SamplerState.create(drawn, range(30), vocab_size=VOCAB, sample_index=index)
        expected = Oracle().expected_tokens(range(30), 40, rounds[index], partial(draw, sampler))
        assert stream.tokens(index) == expected


def draw(sampler: SamplerState, logits: np.ndarray) -> int:
    (token,) = sample(torch.from_numpy(logits)[None], [sampler])
    return token.token_id


def test_short_pages_preempt_the_youngest_and_everybody_gets_their_tokens() -> None:
    loop = serving(TinyEngine(), num_pages=1 + 12)
    prompts = [[n + 1] * (3 + n) for n in range(6)]
    streams = submit(loop, *(request(prompt, 20) for prompt in prompts))
    run(loop)
    assert [stream.tokens() for stream in streams] == [Oracle().expected_tokens(prompt, 20) for prompt in prompts]
    assert loop.load().engines[0].preemptions > 0
    assert sum(stream.usage.preemptions for stream in streams) == loop.load().engines[0].preemptions
    assert streams[0].usage.preemptions == 0

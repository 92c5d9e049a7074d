"""Bad values are refused by name, good edge values are taken."""

from __future__ import annotations

import math

import pytest

from runtime_service.core.params import CompactionParams, SamplingParams, StopParams
from shared.errors import FieldOutOfRange

REFUSED_SAMPLING = [
    *(("temperature", value) for value in (math.nan, math.inf, -0.1, 10.5, 1e30)),
    *(("top_p", value) for value in (0.0, -0.5, 1.0001, math.nan)),
    *(("top_k", value) for value in (-1, 2**31)),
    *(("min_p", value) for value in (-0.1, 1.0, math.nan)),
    *(("repetition_penalty", value) for value in (0.0, -1.0, 10.5, math.nan, math.inf)),
    *(("presence_penalty", value) for value in (-2.1, 2.1, math.nan)),
    *(("frequency_penalty", value) for value in (-2.1, 2.1, math.inf)),
    *(("seed", value) for value in (-1, 2**64)),
    *(("n", value) for value in (0, -1, 17)),
    *(("logprobs", value) for value in (-1, 21)),
]
ACCEPTED_SAMPLING = [
    *(("temperature", value) for value in (0.0, 5e-324, 10.0)),
    *(("top_p", value) for value in (1e-9, 1.0)),
    *(("top_k", value) for value in (0, 10_000_000, 2**31 - 1)),
    *(("min_p", value) for value in (0.0, 0.999)),
    *(("repetition_penalty", value) for value in (1e-45, 10.0)),
    *(("presence_penalty", value) for value in (-2.0, 2.0)),
    *(("frequency_penalty", value) for value in (-2.0, 2.0)),
    *(("seed", value) for value in (None, 0, 2**64 - 1)),
    *(("n", value) for value in (1, 16)),
    *(("logprobs", value) for value in (None, 0, 20)),
]
REFUSED_STOPPING = [
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": -1}),
    ("max_tokens", {"max_tokens": 1_000_001}),
    ("min_tokens", {"max_tokens": 4, "min_tokens": 5}),
    ("min_tokens", {"max_tokens": 4, "min_tokens": -1}),
    ("stop", {"max_tokens": 4, "stop": ("a", "")}),
    ("stop", {"max_tokens": 4, "stop": ("x" * 1_000_000,)}),
    ("stop", {"max_tokens": 4, "stop": ("é" * 1025, "é" * 1024)}),
    ("stop", {"max_tokens": 4, "stop": tuple("abcdefghijklmnopq")}),
    ("stop", {"max_tokens": 4, "stop": ("\ud800",)}),
    ("stop_token_ids", {"max_tokens": 4, "stop_token_ids": (-1,)}),
    ("stop_token_ids", {"max_tokens": 4, "stop_token_ids": (2**31,)}),
    ("stop_token_ids", {"max_tokens": 4, "stop_token_ids": tuple(range(65))}),
]
REFUSED_COMPACTION = [
    ("name", {"policy": "", "budget": 8, "interval": 4}),
    ("budget", {"policy": "p", "budget": 0, "interval": 4}),
    ("budget", {"policy": "p", "budget": 1_000_001, "interval": 4}),
    ("interval", {"policy": "p", "budget": 8, "interval": 0}),
    ("interval", {"policy": "p", "budget": 8, "interval": 1_000_001}),
    ("sinks", {"policy": "p", "budget": 8, "interval": 4, "sinks": 8}),
    ("sinks", {"policy": "p", "budget": 8, "interval": 4, "sinks": -1}),
]


@pytest.mark.parametrize(("field", "value"), REFUSED_SAMPLING)
def test_bad_sampling_values_are_refused_by_name(field, value):
    with pytest.raises(FieldOutOfRange) as refusal:
        SamplingParams(**{field: value})
    assert refusal.value.field == f"sampling.{field}"
    assert refusal.value.details["got"] == repr(value)
    assert refusal.value.details["expected"] in refusal.value.message


@pytest.mark.parametrize(("field", "value"), ACCEPTED_SAMPLING)
def test_edge_values_are_taken(field, value):
    assert getattr(SamplingParams(**{field: value}), field) == value


@pytest.mark.parametrize(("field", "arguments"), REFUSED_STOPPING)
def test_bad_stopping_values_are_refused_by_name(field, arguments):
    with pytest.raises(FieldOutOfRange) as refusal:
        StopParams(**arguments)
    assert refusal.value.field == f"stopping.{field}"
    assert len(refusal.value.message) < 300, "a refused megabyte is not sent back"


@pytest.mark.parametrize(("field", "arguments"), REFUSED_COMPACTION)
def test_bad_compaction_values_are_refused_by_name(field, arguments):
    with pytest.raises(FieldOutOfRange) as refusal:
        CompactionParams(**arguments)
    assert refusal.value.field == f"kv.policy.{field}"


def test_caps_are_inclusive():
    StopParams(max_tokens=1_000_000, min_tokens=1_000_000)
    StopParams(max_tokens=1, stop=("é" * 1024, "é" * 1024))
    StopParams(max_tokens=1, stop=tuple("abcdefghijklmnop"), stop_token_ids=tuple(range(64)))
    CompactionParams("p", budget=1, interval=1, sinks=0)
    CompactionParams("p", budget=1_000_000, interval=1_000_000, sinks=999_999)


def test_stop_ids_are_checked_against_the_vocabulary():
    stopping = StopParams(max_tokens=1, stop_token_ids=(3, 299))
    stopping.check_vocabulary(300)
    with pytest.raises(FieldOutOfRange, match="0 to 298; got 299"):
        stopping.check_vocabulary(299)


def test_unknown_policies_are_refused_with_the_known_ones():
    compaction = CompactionParams("magic", budget=8, interval=4)
    compaction.check_policy({"magic"})
    with pytest.raises(FieldOutOfRange, match="one of knorm, sink_recent; got 'magic'"):
        compaction.check_policy({"sink_recent", "knorm"})


def test_end_ids_join_the_models_with_the_callers():
    assert StopParams(max_tokens=1, stop_token_ids=(5,)).end_ids((1, 2)) == {1, 2, 5}
    assert StopParams(max_tokens=1, stop_token_ids=(5,), ignore_eos=True).end_ids((1, 2)) == {5}


@pytest.mark.parametrize(
    ("params", "greedy"),
    [
        (SamplingParams(), True),
        (SamplingParams(temperature=1e-5), True),
        (SamplingParams(temperature=1.0, top_k=1), True),
        (SamplingParams(temperature=1e-4), False),
        (SamplingParams(temperature=1.0, top_k=2), False),
    ],
)
def test_greedy(params, greedy):
    assert params.is_greedy is greedy


@pytest.mark.parametrize("changed", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_each_penalty_counts(changed):
    assert not SamplingParams().has_penalties
    assert SamplingParams(**{changed: 1.5}).has_penalties

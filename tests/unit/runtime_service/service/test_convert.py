"""Every field of the wire arrives; every event goes out whole."""

from __future__ import annotations

import pytest
from google.protobuf.duration_pb2 import Duration

from runtime_service.core.params import CompactionParams, SamplingParams, StopParams
from runtime_service.core.sampled import SampledToken, TokenLogprob
from runtime_service.service import convert
from runtime_service.streaming.events import Failure, Finished, FinishReason, TokenDelta, Usage
from shared.errors import FieldOutOfRange, KVExhausted
from shared.kernels.compaction.modes import Mode
from shared.pb.quire.v1 import control_pb2 as control
from shared.pb.quire.v1 import inference_pb2 as pb


def test_unset_sampling_takes_the_documented_defaults():
    assert convert.sampling_params(pb.Sampling()) == SamplingParams(0.0, 1.0, 0, 0.0, 1.0, 0.0, 0.0, None, 1, None)


def test_every_sampling_field_arrives():
    values = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 7,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.75,
        "seed": 2**64 - 1,
        "n": 3,
        "logprobs": 0,
    }
    assert set(values) == set(pb.Sampling.DESCRIPTOR.fields_by_name), "a new field needs a place in SamplingParams"
    assert convert.sampling_params(pb.Sampling(**values)) == SamplingParams(**values)


def test_set_zeros_are_not_defaults():
    with pytest.raises(FieldOutOfRange) as refusal:
        convert.sampling_params(pb.Sampling(top_p=0.0))
    assert refusal.value.field == "sampling.top_p"
    with pytest.raises(FieldOutOfRange) as refusal:
        convert.stop_params(pb.Stopping(max_tokens=0), 100)
    assert refusal.value.field == "stopping.max_tokens"


def test_stopping():
    assert convert.stop_params(pb.Stopping(), 100) == StopParams(16)
    assert convert.stop_params(pb.Stopping(), 10) == StopParams(10)
    message = pb.Stopping(max_tokens=9, min_tokens=2, stop=["a", "b"], stop_token_ids=[3], ignore_eos=True)
    assert convert.stop_params(message, 9) == StopParams(9, 2, ("a", "b"), (3,), True)
    with pytest.raises(FieldOutOfRange, match="at most 8 on this server; got 9"):
        convert.stop_params(message, 8)


def test_compaction_is_the_requests_or_off_or_the_engines():
    default = CompactionParams("knorm", 64, 16)
    assert convert.compaction_params(pb.KVOptions(), default) == default
    assert convert.compaction_params(pb.KVOptions(), None) is None
    assert convert.compaction_params(pb.KVOptions(off=True), default) is None
    policy = pb.CompactionOptions(name="sink_recent", budget=8, interval=2, sinks=0)
    assert convert.compaction_params(pb.KVOptions(policy=policy), default) == CompactionParams("sink_recent", 8, 2, 0)
    policy.ClearField("sinks")
    assert convert.compaction_params(pb.KVOptions(policy=policy), None) == CompactionParams("sink_recent", 8, 2, 4)


def test_bad_compaction_is_named_where_it_stands():
    with pytest.raises(FieldOutOfRange, match=r"^kv\.policy\.budget") as refusal:
        convert.compaction_params(pb.KVOptions(policy=pb.CompactionOptions(name="knorm", interval=2)), None)
    assert refusal.value.field == "kv.policy.budget"
    with pytest.raises(FieldOutOfRange, match=r"^default_compaction\.budget") as refusal:
        convert.default_compaction(control.CompactionDefaults(name="knorm", interval=2))
    assert refusal.value.field == "default_compaction.budget"
    assert refusal.value.details["got"] == "0"


def test_compaction_goes_out_as_it_came_in():
    for mode in Mode:
        params = CompactionParams("knorm", 64, 16, 2, mode)
        assert convert.default_compaction(convert.compaction_message(params)) == params
    unset = pb.CompactionOptions(name="knorm", budget=64, interval=16)
    assert convert.compaction_params(pb.KVOptions(policy=unset), None) == CompactionParams("knorm", 64, 16)
    unset.mode = 9  # of a later version
    with pytest.raises(FieldOutOfRange, match=r"kv\.policy\.mode must be ordered or hole_filling, 1 or 2; got 9"):
        convert.compaction_params(pb.KVOptions(policy=unset), None)


def test_caps_of_the_wire():
    assert convert.cache_salt(pb.KVOptions(cache_salt="é" * 128)) == "é" * 128
    with pytest.raises(FieldOutOfRange, match="at most 256 bytes; got 258"):
        convert.cache_salt(pb.KVOptions(cache_salt="é" * 129))
    assert convert.priority(pb.GenerateRequest(priority=-1000)) == -1000
    with pytest.raises(FieldOutOfRange, match="got 1001"):
        convert.priority(pb.GenerateRequest(priority=1001))


def test_durations_are_capped_and_positive():
    assert convert.seconds(Duration(seconds=1, nanos=500_000_000), "run_timeout", 10) == 1.5
    assert convert.seconds(Duration(seconds=100), "run_timeout", 10) == 10
    for bad in (Duration(), Duration(seconds=-1)):
        with pytest.raises(FieldOutOfRange) as refusal:
            convert.seconds(bad, "run_timeout", 10)
        assert refusal.value.field == "run_timeout"


def test_deltas():
    tokens = (SampledToken(5, -0.5, (TokenLogprob(5, -0.5), TokenLogprob(6, -1.5))), SampledToken(7, -0.25))
    assert convert.response(TokenDelta(2, tokens, "hi")) == pb.GenerateResponse(
        delta=pb.TokenDelta(
            index=2,
            token_ids=[5, 7],
            text="hi",
            logprobs=[
                pb.TokenLogprobs(
                    logprob=-0.5, top=[pb.TopLogprob(token_id=5, logprob=-0.5), pb.TopLogprob(token_id=6, logprob=-1.5)]
                ),
                pb.TokenLogprobs(logprob=-0.25),
            ],
        )
    )
    assert not convert.response(TokenDelta(0, (SampledToken(5),), "hi")).delta.logprobs


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (Finished(1, FinishReason.STOP, "END"), pb.Finished(index=1, reason=pb.FINISH_REASON_STOP, stop="END")),
        (Finished(1, FinishReason.STOP, 0), pb.Finished(index=1, reason=pb.FINISH_REASON_STOP, stop_token_id=0)),
        (Finished(0, FinishReason.STOP), pb.Finished(reason=pb.FINISH_REASON_STOP)),
        (Finished(0, FinishReason.LENGTH), pb.Finished(reason=pb.FINISH_REASON_LENGTH)),
        (Finished(0, FinishReason.CANCELLED), pb.Finished(reason=pb.FINISH_REASON_CANCELLED)),
    ],
)
def test_finishes(event, message):
    assert convert.response(event).finished == message


def test_usage_goes_out_whole():
    values = {field: index + 1 for index, field in enumerate(Usage.__dataclass_fields__)}
    assert set(values) == set(pb.Usage.DESCRIPTOR.fields_by_name)
    assert convert.response(Usage(**values)).usage == pb.Usage(**values)


def test_failures_keep_their_facts():
    error = convert.response(Failure(KVExhausted("no room", details={"pages": "3"}))).error
    assert (error.reason, error.message, error.retryable, dict(error.metadata)) == ("KV_EXHAUSTED", "no room", True, {"pages": "3"})

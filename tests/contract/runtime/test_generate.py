"""Generate over the wire: the shape of a stream, and what is refused before it begins."""

from __future__ import annotations

import asyncio
import itertools
import threading

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from shared.pb.quire.v1 import control_pb2
from shared.pb.quire.v1 import inference_pb2 as pb
from shared.rpc.status import from_rpc_error
from tests.contract.runtime.conftest import PAGED_ID, finish_of, generate, kinds, serve, text_of, tokens_of
from tests.support.tiny_engine import EOS, Oracle, sink_recent_rounds

PROMPT = [3, 1, 4, 1, 5]
ORACLE = Oracle()
EXPECTED = ORACLE.expected_tokens(PROMPT, 8)


async def refused(served, request, code, reason):
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await served.events(request)
    assert failure.value.code() is code, failure.value.details()
    error = from_rpc_error(failure.value)
    assert error.reason == reason, error
    return error


async def test_a_stream_is_accepted_deltas_finished_usage(served):
    events = await served.events(generate(PROMPT, request_id="mine"))
    assert [kind for kind, _ in itertools.groupby(kinds(events))] == ["accepted", "delta", "finished", "usage"]
    assert events[0].accepted == pb.Accepted(request_id="mine", prompt_tokens=5)
    assert tokens_of(events) == EXPECTED
    assert text_of(events) == " ".join(f"w{token}" for token in EXPECTED)
    assert finish_of(events).reason == pb.FINISH_REASON_LENGTH
    usage = events[-1].usage
    assert (usage.prompt_tokens, usage.generated_tokens, usage.preemptions) == (5, 8, 0)


async def test_text_and_ids_are_the_same_prompt(served):
    events = await served.events(generate("w3 w1 w4 w1 w5"))
    assert events[0].accepted.prompt_tokens == 5
    assert tokens_of(events) == EXPECTED


async def test_an_engine_goes_by_its_artifact_id_too(served):
    assert tokens_of(await served.events(generate(PROMPT, engine=PAGED_ID))) == EXPECTED


async def test_ids_are_made_up_where_none_is_given(served):
    first, second = [(await served.events(generate(PROMPT)))[0].accepted.request_id for _ in range(2)]
    assert first != second
    assert len(first) == 32


async def test_defaults_are_greedy_and_sixteen_tokens(served):
    request = pb.GenerateRequest(engine="tiny", token_ids=pb.TokenIds(ids=PROMPT))
    request.stopping.ignore_eos = True
    assert tokens_of(await served.events(request)) == ORACLE.expected_tokens(PROMPT, 16)


async def test_samples_do_not_mix(served):
    """BR-123: three samples, one of which is stopped early by its own text."""
    sampling = pb.Sampling(temperature=5.0, seed=7, n=3)
    events = await served.events(generate(PROMPT, sampling=sampling))
    outputs = [tokens_of(events, index) for index in range(3)]
    assert all(len(output) == 8 for output in outputs)
    assert len({tuple(output) for output in outputs}) == 3
    only_first = next(token for token in outputs[0] if token not in outputs[1] + outputs[2])
    stopped = await served.events(generate(PROMPT, sampling=sampling, stop_token_ids=[only_first]))
    assert finish_of(stopped, 0).stop_token_id == only_first
    assert finish_of(stopped, 0).reason == pb.FINISH_REASON_STOP
    assert [tokens_of(stopped, index) for index in (1, 2)] == outputs[1:]
    assert tokens_of(stopped, 0) == outputs[0][: outputs[0].index(only_first) + 1]
    assert kinds(stopped).count("finished") == 3
    assert stopped[-1].usage.generated_tokens == sum(len(tokens_of(stopped, index)) for index in range(3))


async def test_stop_strings_end_the_text_before_them(served):
    stop = f"w{EXPECTED[2]}"
    events = await served.events(generate(PROMPT, stop=[stop]))
    assert text_of(events) == f"w{EXPECTED[0]} w{EXPECTED[1]} "
    assert finish_of(events) == pb.Finished(reason=pb.FINISH_REASON_STOP, stop=stop)
    assert tokens_of(events) == EXPECTED[:3]


async def test_logprobs_come_with_their_tokens(served):
    events = await served.events(generate(PROMPT, 2, sampling=pb.Sampling(logprobs=3)))
    told = [logprobs for event in events if event.WhichOneof("event") == "delta" for logprobs in event.delta.logprobs]
    assert [logprobs.top[0].token_id for logprobs in told] == EXPECTED[:2], "greedy takes the likeliest"
    for logprobs in told:
        assert logprobs.top[0].logprob == logprobs.logprob < 0
        assert len(logprobs.top) == 3


async def test_compaction_is_used_and_told(served):
    kv = pb.KVOptions(policy=pb.CompactionOptions(name="sink_recent", budget=8, interval=4))
    events = await served.events(generate(PROMPT, 40, kv=kv))
    rounds = sink_recent_rounds(5 + 39, budget=8, interval=4, sinks=4)
    assert tokens_of(events) == ORACLE.expected_tokens(PROMPT, 40, rounds)
    usage = events[-1].usage
    assert usage.compaction_rounds == len([round_ for round_ in rounds if round_.at < 5 + 39]), "a finished one needs no round"
    assert usage.tokens_evicted == 4 * usage.compaction_rounds
    stats = await served.control.GetCompactionStats(control_pb2.GetCompactionStatsRequest(engine="tiny"))
    assert (stats.engines[0].rounds, stats.engines[0].tokens_evicted) == (usage.compaction_rounds, usage.tokens_evicted)


BAD = {
    "unknown engine": (generate(PROMPT, engine="other"), grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND", ""),
    **{
        name: (request, grpc.StatusCode.INVALID_ARGUMENT, "FIELD_OUT_OF_RANGE", field)
        for name, request, field in [
            ("no prompt", pb.GenerateRequest(engine="tiny"), "prompt"),
            ("no ids", generate([]), "prompt"),
            ("id out of range", generate([251]), "prompt"),
            ("huge id", generate([2**32 - 1]), "prompt"),
            ("request id", generate(PROMPT, request_id="../x"), "request_id"),
            ("max_tokens 0", generate(PROMPT, 0), "stopping.max_tokens"),
            ("max_tokens absurd", generate(PROMPT, 2**32 - 1), "stopping.max_tokens"),
            ("longer than the cache", generate(PROMPT, 61), "stopping.max_tokens"),
            ("empty stop string", generate(PROMPT, stop=["a", ""]), "stopping.stop"),
            ("a megabyte of stop strings", generate(PROMPT, stop=["x" * 100_000] * 10), "stopping.stop"),
            ("stop id out of range", generate(PROMPT, stop_token_ids=[251]), "stopping.stop_token_ids"),
            ("NaN temperature", generate(PROMPT, sampling=pb.Sampling(temperature=float("nan"))), "sampling.temperature"),
            ("negative temperature", generate(PROMPT, sampling=pb.Sampling(temperature=-1)), "sampling.temperature"),
            ("top_p 0", generate(PROMPT, sampling=pb.Sampling(top_p=0)), "sampling.top_p"),
            ("n 0", generate(PROMPT, sampling=pb.Sampling(n=0)), "sampling.n"),
            (
                "unknown policy",
                generate(PROMPT, kv=pb.KVOptions(policy=pb.CompactionOptions(name="magic", budget=8, interval=4))),
                "kv.policy.name",
            ),
            (
                "budget 0",
                generate(PROMPT, kv=pb.KVOptions(policy=pb.CompactionOptions(name="knorm", interval=4))),
                "kv.policy.budget",
            ),
            ("salt", generate(PROMPT, kv=pb.KVOptions(cache_salt="x" * 257)), "kv.cache_salt"),
            ("priority", pb.GenerateRequest(engine="tiny", priority=2**31 - 1), "priority"),
            ("timeout", pb.GenerateRequest(engine="tiny", run_timeout=Duration(seconds=-1)), "run_timeout"),
        ]
    },
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_requests_are_refused_and_change_nothing(served, name):
    request, code, reason, field = BAD[name]
    before = await served.engine_load()
    error = await refused(served, request, code, reason)
    assert error.field == field
    assert not error.retryable
    assert await served.engine_load() == before
    assert served.gate.steps == 0


async def test_prompts_over_the_servers_caps_are_refused(tmp_path):
    """BR-156, BR-162: by bytes before tokenising, by tokens after; both below what the transport takes."""
    async with serve(tmp_path, max_prompt_bytes=1000, max_prompt_tokens=20) as served:
        await served.load()
        invalid = grpc.StatusCode.INVALID_ARGUMENT, "FIELD_OUT_OF_RANGE"
        assert "1000 bytes; got 3000000" in (await refused(served, generate("x" * 3_000_000), *invalid)).message
        assert "20 tokens; got 21" in (await refused(served, generate("w1 " * 21), *invalid)).message
        assert "20 tokens; got 1000000" in (await refused(served, generate([1] * 1_000_000), *invalid)).message
        too_large = await refused(served, generate("x" * 5_000_000), grpc.StatusCode.RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE")
        assert not too_large.retryable


async def test_an_id_that_is_alive_is_taken(served):
    """BR-121: the first owner of the id is not disturbed."""
    served.gate.close()
    first = served.inference.Generate(generate(PROMPT, request_id="same"))
    assert (await first.read()).accepted.request_id == "same"
    await refused(served, generate([9], request_id="same"), grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST")
    served.gate.open()
    rest = []
    while (event := await first.read()) is not grpc.aio.EOF:
        rest.append(event)
    assert tokens_of(rest) == EXPECTED


async def test_an_id_is_free_once_its_stream_has_ended(served):
    """The end of the earlier call does not touch the later request of the same id."""
    for _ in range(30):
        events = await served.events(generate(PROMPT, 2, request_id="again"))
        assert finish_of(events).reason == pb.FINISH_REASON_LENGTH


async def test_a_full_queue_is_retryable(tmp_path):
    async with serve(tmp_path, max_waiting_requests=1) as served:
        await served.load()
        served.gate.close()
        running = served.inference.Generate(generate(PROMPT))
        await running.read()
        await served.gate.until_held()
        waiting = served.inference.Generate(generate(PROMPT))
        await waiting.read()
        error = await refused(served, generate(PROMPT), grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert error.retryable
        assert error.retry_after_s > 0
        served.gate.open()


async def test_a_request_that_never_fits_is_refused_at_once(tmp_path):
    """BR-113."""
    async with serve(tmp_path) as served:
        await served.load(num_pages=3)
        error = await refused(served, generate(PROMPT, 20), grpc.StatusCode.RESOURCE_EXHAUSTED, "KV_EXHAUSTED")
        assert "6 pages" in error.message
        assert tokens_of(await served.events(generate(PROMPT, 3))) == EXPECTED[:3]


async def test_requests_of_many_clients_do_not_mix(served):
    prompts = [[i, 2 * i, 3 * i + 1] for i in range(1, 21)]
    streams = await asyncio.gather(*(served.events(generate(prompt, 10)) for prompt in prompts))
    for prompt, events in zip(prompts, streams, strict=True):
        assert tokens_of(events) == ORACLE.expected_tokens(prompt, 10)
    assert (await served.until_ended(20)).requests_finished == 20


async def test_a_long_tokenisation_holds_nobody_up(served, monkeypatch):
    """BR-162: while one prompt is being tokenised, other calls are answered."""
    encoder = served.runtime.engines.find("tiny").prompts
    entered, release = threading.Event(), threading.Event()
    tokenise = type(encoder)._tokenise

    def slow(self, text):
        entered.set()
        assert release.wait(60)
        return tokenise(self, text)

    monkeypatch.setattr(type(encoder), "_tokenise", slow)
    stuck = asyncio.create_task(served.events(generate("w3 w1 w4 w1 w5")))
    await asyncio.to_thread(entered.wait)
    assert tokens_of(await served.events(generate(PROMPT))) == EXPECTED
    assert not stuck.done()
    release.set()
    assert tokens_of(await stuck) == EXPECTED


async def test_end_of_text_is_stop(served):
    """The tiny model's end-of-text token is made the likeliest by asking where it comes up."""
    for start in range(200):
        tokens = ORACLE.expected_tokens([start], 30)
        if EOS in tokens:
            events = await served.events(generate([start], 30, ignore_eos=False))
            assert tokens_of(events) == tokens[: tokens.index(EOS) + 1]
            assert finish_of(events) == pb.Finished(reason=pb.FINISH_REASON_STOP)
            return
    pytest.fail("no prompt of one token leads to the end of text")

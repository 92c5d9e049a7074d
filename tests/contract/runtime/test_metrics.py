"""The runtime's metrics, scraped over HTTP while it serves and compared with what was done."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import pytest

from shared.errors import FieldOutOfRange
from shared.ids import PageId
from shared.pb.quire.v1 import control_pb2
from shared.pb.quire.v1 import inference_pb2 as pb
from tests.contract.runtime.conftest import LINEAR_ID, NUM_PAGES, PAGED_ID, generate, serve
from tests.support.scrape import scrape

PROMPT = [3, 1, 4, 1, 5]
STATES = ("free", "cached", "exclusive", "shared")
COMPACTED = pb.KVOptions(policy=pb.CompactionOptions(name="sink_recent", budget=8, interval=16))


@contextlib.asynccontextmanager
async def metered(data, **settings):
    async with serve(data, metrics_address="127.0.0.1:0", **settings) as served:
        await served.load()

        async def read():
            return await scrape(served.runtime.metrics.address)

        yield served, read


async def to_the_end(call):
    while await call.read() is not grpc.aio.EOF:
        pass


async def refused(served, request):
    with pytest.raises(grpc.aio.AioRpcError):
        await served.events(request)


async def test_what_was_done_is_what_is_shown(tmp_path):
    async with metered(tmp_path) as (served, read):
        first = (await served.events(generate(PROMPT, 8)))[-1].usage
        second = (await served.events(generate(PROMPT, 40, kv=COMPACTED)))[-1].usage
        await served.events(generate([1, 2], 3, sampling=pb.Sampling(n=2, temperature=1.0)))
        served.gate.fail_with = RuntimeError("the device is on fire")
        await served.events(generate(PROMPT))
        cancelled = served.inference.Generate(generate(PROMPT, 50))
        while (await cancelled.read()).WhichOneof("event") != "delta":
            pass
        cancelled.cancel()
        await served.until_ended(5)
        await refused(served, generate(PROMPT, engine="other"))
        for _ in range(2):
            await refused(served, generate(PROMPT, 0))
        load = await served.engine_load()
        seen = await read()

        tiny = {"engine": "tiny"}
        outcomes = [seen("quire_runtime_requests_total", outcome=o, **tiny) for o in ("finished", "cancelled", "failed")]
        assert outcomes == [3, 1, 1]
        assert seen("quire_runtime_prompt_tokens_total", **tiny) == load.prompt_tokens == 4 * 5 + 2
        # The second and the one whose step failed found the full page of the first; after that step nothing is offered any more.
        assert seen("quire_runtime_prefix_cache_queries_total", **tiny) == load.prefix_queries == load.prompt_tokens
        assert seen("quire_runtime_prefix_cache_hits_total", **tiny) == load.prefix_hits == 4 + 4
        assert (first.cached_tokens, second.cached_tokens) == (0, 4)
        assert seen("quire_runtime_kv_pages", state="cached", **tiny) == load.pages_cached > 0
        assert seen("quire_runtime_generated_tokens_total", **tiny) == load.generated_tokens >= 8 + 40 + 6 + 1
        assert seen("quire_runtime_steps_total", **tiny) == load.steps
        assert seen("quire_runtime_requests_running", **tiny) == seen("quire_runtime_requests_waiting", **tiny) == 0
        assert seen("quire_runtime_kv_usage_ratio", **tiny) == 0
        assert seen("quire_runtime_kv_pages_leaked_total", **tiny) == 0

        assert seen("quire_runtime_compaction_rounds_total", **tiny) == second.compaction_rounds > 0
        assert seen("quire_runtime_compaction_evicted_tokens_total", **tiny) == second.tokens_evicted
        assert seen("quire_runtime_compaction_freed_pages_total", **tiny) == second.pages_freed > 0
        stats = (await served.control.GetCompactionStats(control_pb2.GetCompactionStatsRequest(engine="tiny"))).engines[0]
        assert seen("quire_runtime_compaction_moved_bytes_total", **tiny) == stats.bytes_moved > 0
        assert seen("quire_runtime_compaction_seconds_total", **tiny) == pytest.approx(stats.duration_s)

        # BR-173: four requests had a first token, five had a first step, four of those with a token have ended.
        counts = {
            n: seen(f"quire_runtime_{n}_seconds_count", **tiny) for n in ("time_to_first_token", "prefill", "queue", "decode")
        }
        assert counts == {"time_to_first_token": 4, "prefill": 4, "queue": 5, "decode": 4}
        assert seen("quire_runtime_time_to_first_token_seconds_sum", **tiny) >= first.time_to_first_token_s
        # A gap fewer than tokens for each of the samples: 8, 40, twice 3, and what the cancelled one got.
        assert seen("quire_runtime_inter_token_seconds_count", **tiny) == load.generated_tokens - 5

        calls = {(s["method"], s["outcome"]) for s in seen.series("quire_runtime_calls_total") if s["method"] == "Generate"}
        assert calls == {("Generate", o) for o in ("OK", "CANCELLED", "MODEL_NOT_FOUND", "FIELD_OUT_OF_RANGE")}
        assert seen("quire_runtime_calls_total", method="Generate", outcome="FIELD_OUT_OF_RANGE") == 2
        assert seen("quire_runtime_calls_total", method="LoadEngine", outcome="OK") == 1


async def test_a_scrape_in_the_middle_of_serving(tmp_path):
    """Eight rows run, four wait; the states of the pages add up to all of them."""
    async with metered(tmp_path) as (served, read):
        served.gate.close()
        calls = [served.inference.Generate(generate(PROMPT, 30)) for _ in range(12)]
        for call in calls:
            await call.read()
        while (seen := await read())("quire_runtime_requests_running", engine="tiny") < 8:
            served.gate.let_through(1)
            await served.gate.until_held()
        assert seen("quire_runtime_requests_waiting", engine="tiny") == 4
        pages = {state: seen("quire_runtime_kv_pages", engine="tiny", state=state) for state in STATES}
        assert sum(pages.values()) == NUM_PAGES - 1
        assert pages["exclusive"] >= 8
        assert pages["shared"] == 1  # the full page of the prompt, which the first two of the rows have computed
        assert seen("quire_runtime_kv_usage_ratio", engine="tiny") == (pages["exclusive"] + pages["shared"]) / (NUM_PAGES - 1)
        assert seen("quire_runtime_draining") == 0
        served.gate.open()
        for call in calls:
            await to_the_end(call)
        await served.until_ended(12)


async def test_shared_pages_are_counted_once(tmp_path):
    """Three samples go on from one prompt of five tokens: its full page of four is everybody's."""
    async with metered(tmp_path) as (served, read):
        served.gate.close()
        call = served.inference.Generate(generate(PROMPT, 30, sampling=pb.Sampling(n=3, temperature=1.0)))
        await call.read()
        while (seen := await read())("quire_runtime_kv_pages", engine="tiny", state="shared") < 1:
            served.gate.let_through(1)
            await served.gate.until_held()
        pages = {state: seen("quire_runtime_kv_pages", engine="tiny", state=state) for state in STATES}
        assert pages == {"free": NUM_PAGES - 1 - 4, "cached": 0, "exclusive": 3, "shared": 1}
        served.gate.open()
        await to_the_end(call)


async def test_a_page_that_nobody_gives_back_shows(tmp_path):
    """The page is really lost: taken from the pool's allocator behind everybody's back."""
    async with metered(tmp_path) as (served, read):
        (session,) = served.runtime.loop._sessions.values()
        assert session.allocator.try_allocate(1) == [PageId(1)]
        for _ in range(2):
            await served.events(generate(PROMPT))
        while (await read())("quire_runtime_kv_pages_leaked_total", engine="tiny") != 1:
            await asyncio.sleep(0.01)


async def test_each_engine_has_its_series_as_long_as_it_is_loaded(tmp_path):
    async with metered(tmp_path) as (served, read):
        await served.load(LINEAR_ID, name="line", num_pages=5)
        await served.events(generate(PROMPT, engine="line"))
        while (seen := await read())("quire_runtime_requests_total", engine="line", outcome="finished") < 1:
            await asyncio.sleep(0.01)  # a stream may end before the turn it ends in is reported
        assert seen("quire_runtime_requests_total", engine="tiny", outcome="finished") == 0
        facts = {s["engine"]: s for s in seen.series("quire_runtime_cache_config_info")}
        assert (facts["tiny"]["artifact"], facts["tiny"]["block_size"], facts["tiny"]["num_gpu_blocks"]) == (PAGED_ID, "4", "64")
        assert (facts["line"]["layout"], facts["line"]["block_size"], facts["line"]["num_gpu_blocks"]) == ("linear", "64", "4")
        await served.control.UnloadEngine(control_pb2.UnloadEngineRequest(name="line"))
        seen = await read()
        assert {s["engine"] for name in seen.names for s in seen.series(name) if "engine" in s} == {"tiny"}


async def test_draining_shows_until_the_end(tmp_path):
    async with metered(tmp_path) as (served, read):
        await served.control.Drain(control_pb2.DrainRequest())
        assert (await read())("quire_runtime_draining") == 1


async def test_readers_at_any_time_see_whole_histograms(tmp_path):
    """Buckets only grow, the last one is the count: readings are taken between steps, whatever runs meanwhile."""
    async with metered(tmp_path) as (served, read):
        serving = [asyncio.create_task(served.events(generate([n], 25))) for n in range(8)]
        while not all(task.done() for task in serving):
            seen = await read()
            buckets = sorted(
                (float(dict(labels)["le"]), value)
                for (name, labels), value in seen.samples.items()
                if name == "quire_runtime_inter_token_seconds_bucket"
            )
            values = [value for _, value in buckets]
            assert values == sorted(values)
            assert values[-1] == seen("quire_runtime_inter_token_seconds_count")
        assert (await read())("quire_runtime_inter_token_seconds_count") == 8 * 24


@pytest.mark.parametrize("address", ["0.0.0.0:0", "10.1.2.3:9000"])
async def test_metrics_do_not_leave_the_machine_by_accident(tmp_path, address):
    with pytest.raises(FieldOutOfRange, match="loopback") as error:
        async with serve(tmp_path, metrics_address=address):
            pass
    assert error.value.field == "metrics_address"
    async with serve(tmp_path, metrics_address="0.0.0.0:0", allow_plaintext=True) as served:
        port = served.runtime.metrics.address.rpartition(":")[2]
        assert (await scrape(f"127.0.0.1:{port}"))("quire_runtime_draining") == 0


@pytest.mark.parametrize("address", ["nowhere", "localhost:", "127.0.0.1:http", "127.0.0.1:70000", "example.com:1"])
async def test_an_address_that_is_none_is_refused(tmp_path, address):
    with pytest.raises(FieldOutOfRange) as error:
        async with serve(tmp_path, metrics_address=address):
            pass
    assert error.value.field == "metrics_address"


async def test_a_taken_port_is_named(tmp_path):
    async with metered(tmp_path) as (served, _):
        with pytest.raises(FieldOutOfRange, match="in use"):
            async with serve(tmp_path, metrics_address=served.runtime.metrics.address):
                pass

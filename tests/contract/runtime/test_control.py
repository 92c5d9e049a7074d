"""Control over the wire: engines are loaded, and told of with their load and limits."""

from __future__ import annotations

import asyncio

import pytest
from google.protobuf.duration_pb2 import Duration

from shared.artifacts.local import LocalStore
from shared.pb.quire.v1 import common_pb2
from shared.pb.quire.v1 import control_pb2 as pb
from shared.pb.quire.v1 import inference_pb2 as inference
from tests.contract.runtime.conftest import LINEAR_ID, MODEL_ID, PAGED_ID, generate, listed, refused, serve, tokens_of
from tests.support.tiny_engine import Oracle

PROMPT = [3, 1, 4, 1, 5]
EXPECTED = Oracle().expected_tokens(PROMPT, 8)


async def test_a_loaded_engine_tells_what_it_is(served):
    (engine,) = await listed(served)
    assert (engine.name, engine.artifact_id, engine.model_name) == ("tiny", PAGED_ID, "tiny")
    assert engine.backend == common_pb2.BACKEND_INDUCTOR
    assert engine.layout == common_pb2.KV_LAYOUT_PAGED
    assert engine.dtype == common_pb2.ELEMENT_TYPE_FLOAT32
    assert (engine.max_len, engine.page_size, engine.num_pages) == (64, 4, 65)
    assert engine.kv_bytes == 65 * 4 * 2 * 2 * 2 * 8 * 4  # pages, tokens, layers, K and V, heads, head_dim, bytes
    assert [(p.name, p.batch.max, p.query_len.max) for p in engine.profiles] == [("decode", 8, 1), ("prefill", 2, 16)]
    assert engine.load_s > 0
    assert not engine.HasField("default_compaction")


async def test_prefix_reuse_is_told_and_can_be_turned_off_and_keeps_to_its_salt(served):
    prompt = list(range(21))
    off = await served.load(name="off", prefix_caching=False)
    linear = await served.load(LINEAR_ID, name="linear", num_pages=4, prefix_caching=True)
    (engine, *_) = await listed(served)
    assert (engine.prefix_caching, off.prefix_caching, linear.prefix_caching) == (True, False, False)

    async def cached(name, **kv):
        events = await served.events(generate(prompt, 2, engine=name, kv=inference.KVOptions(**kv)))
        assert tokens_of(events) == Oracle().expected_tokens(prompt, 2)
        return events[-1].usage.cached_tokens

    assert [await cached(name) for name in ("off", "off", "linear", "linear")] == [0] * 4
    assert [await cached("tiny", cache_salt=salt) for salt in ("", "a", "", "a", "b")] == [0, 0, 20, 20, 0]
    load = await served.engine_load()
    assert (load.prefix_queries, load.prefix_hits, load.pages_cached) == (5 * 21, 40, 3 * 5)
    assert (load.pages_free, (await served.engine_load("off")).prefix_queries) == (load.pages_total, 0)


async def test_loading_the_same_again_returns_it(served):
    (loaded,) = await listed(served)
    page_bytes = loaded.kv_bytes // loaded.num_pages
    for same in ({"num_pages": None}, {"num_pages": 65}, {"kv_bytes": 66 * page_bytes - 1}):
        assert await served.load(**same) == loaded
    assert len(served.loader.engines) == 1


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"num_pages": 9}, "num_pages 65, not 9"),
        ({"kv_bytes": 1 << 20}, "num_pages 65, not 1024"),
        ({"prefix_caching": False}, "prefix_caching True, not False"),
        ({"default_compaction": pb.CompactionDefaults(name="sink_recent", budget=8, interval=4)}, "default_compaction None, not"),
    ],
)
async def test_what_is_loaded_is_not_returned_for_something_else(served, fields, told):
    before = await listed(served)
    assert told in (await refused(served.load(**fields), "IN_USE")).message
    assert await listed(served) == before


async def test_the_same_load_asked_for_at_once_happens_once(tmp_path):
    async with serve(tmp_path) as served:
        await asyncio.gather(*(served.load() for _ in range(5)))
        assert len(served.loader.engines) == 1


async def test_a_name_serves_one_artifact(served):
    error = await refused(served.load(LINEAR_ID), "IN_USE")
    assert PAGED_ID in error.message
    assert LINEAR_ID in error.message


async def test_both_layouts_side_by_side(served):
    linear = await served.load(LINEAR_ID, name="", num_pages=5)
    assert linear.name == LINEAR_ID[:12]
    assert linear.layout == common_pb2.KV_LAYOUT_LINEAR
    for name in ("tiny", linear.name):
        assert tokens_of(await served.events(generate(PROMPT, engine=name))) == EXPECTED
    assert [engine.name for engine in await listed(served)] == ["tiny", linear.name]


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({"artifact_id": "../../etc/passwd"}, "FIELD_OUT_OF_RANGE", "artifact_id"),
        ({"artifact_id": "f" * 64}, "ARTIFACT_NOT_FOUND", ""),
        ({"artifact_id": MODEL_ID}, "FIELD_OUT_OF_RANGE", "artifact_id"),
        ({"name": "../x"}, "FIELD_OUT_OF_RANGE", "name"),
        ({"num_pages": 1}, "FIELD_OUT_OF_RANGE", "num_pages"),
        ({"kv_bytes": 100}, "MEMORY_EXHAUSTED", ""),
        ({"default_compaction": pb.CompactionDefaults(name="knorm")}, "FIELD_OUT_OF_RANGE", "default_compaction.budget"),
        (
            {"default_compaction": pb.CompactionDefaults(name="magic", budget=8, interval=4)},
            "FIELD_OUT_OF_RANGE",
            "default_compaction.name",
        ),
    ],
)
async def test_bad_loads_are_refused_and_leave_nothing(tmp_path, fields, reason, field):
    async with serve(tmp_path) as served:
        request = pb.LoadEngineRequest(**({"artifact_id": PAGED_ID, "name": "tiny"} | fields))
        await refused(served.control.LoadEngine(request), reason, field)
        assert await listed(served) == []
        assert all(engine.closed for engine in served.loader.engines)
        assert not any(info.in_use for info in LocalStore(tmp_path / "artifacts").list())


async def test_a_pool_beyond_the_hosts_memory_is_refused_before_it_is_filled(tmp_path, monkeypatch):
    """Each layer's tensor may be granted by a host that overcommits, and all of them be the end of the process."""
    monkeypatch.setattr("runtime_service.service.engines.available_bytes", lambda: 10_000)
    async with serve(tmp_path) as served:
        await refused(served.load(num_pages=65), "MEMORY_EXHAUSTED")
        assert await listed(served) == []
        assert (await served.load(num_pages=2)).num_pages == 2


async def test_engines_come_and_go_while_another_waits_for_its_requests(served):
    served.gate.close()
    call = served.inference.Generate(generate(PROMPT, 60))
    await served.gate.until_held()
    request = pb.UnloadEngineRequest(name="tiny", grace=Duration(seconds=60))
    unload = asyncio.ensure_future(served.control.UnloadEngine(request))
    while not served.runtime.loop._removing:
        await asyncio.sleep(0.005)
    again = asyncio.ensure_future(served.load())
    async with asyncio.timeout(20):
        await served.load(LINEAR_ID, name="other", num_pages=3)
    assert not again.done(), "a load of the same name waits for its turn"
    served.gate.open()
    assert tokens_of([event async for event in call]) == Oracle().expected_tokens(PROMPT, 60)
    await unload
    await again
    assert [engine.name for engine in await listed(served)] == ["other", "tiny"]


async def test_a_slow_load_keeps_no_other_engine_waiting(served):
    served.loader.allowed.clear()
    slow = asyncio.ensure_future(served.load(LINEAR_ID, name="slow", num_pages=3))
    while "slow" not in served.runtime.engines._changing:
        await asyncio.sleep(0.005)
    async with asyncio.timeout(20):
        await served.control.UnloadEngine(pb.UnloadEngineRequest(name="tiny"))
    served.loader.allowed.set()
    assert (await slow).name == "slow"


async def test_a_tampered_artifact_is_refused(tmp_path):
    async with serve(tmp_path) as served:
        (path,) = (tmp_path / "artifacts").rglob(f"{MODEL_ID}/tokenizer.json")
        data = bytearray(path.read_bytes())
        data[100] ^= 1
        path.chmod(0o644)
        path.write_bytes(data)
        await refused(served.load(), "ARTIFACT_CORRUPT")
        assert await listed(served) == []


async def test_pools_are_sized_by_bytes_or_by_the_server(tmp_path):
    page = 4 * 2 * 2 * 2 * 8 * 4
    async with serve(tmp_path) as served:
        by_bytes = pb.LoadEngineRequest(artifact_id=PAGED_ID, name="bytes", kv_bytes=10 * page + 1)
        assert (await served.control.LoadEngine(by_bytes)).engine.num_pages == 10
        by_server = pb.LoadEngineRequest(artifact_id=PAGED_ID, name="server")
        assert (await served.control.LoadEngine(by_server)).engine.num_pages == 1 + 8 * 16, "a full batch of the greatest length"


async def test_default_compaction_is_for_requests_that_do_not_choose(tmp_path):
    async with serve(tmp_path) as served:
        default = pb.CompactionDefaults(name="sink_recent", budget=8, interval=4)
        engine = await served.load(default_compaction=default)
        shown = pb.CompactionDefaults(name="sink_recent", budget=8, interval=4, sinks=4, mode="COMPACTION_MODE_ORDERED")
        assert engine.default_compaction == shown
        compacted = await served.events(generate(PROMPT, 40))
        assert compacted[-1].usage.compaction_rounds > 0
        whole = await served.events(generate(PROMPT, 40, kv=inference.KVOptions(off=True)))
        assert whole[-1].usage.compaction_rounds == 0


async def test_server_info_tells_capacity_and_limits(served):
    info = await served.control.GetServerInfo(pb.GetServerInfoRequest())
    assert info.version
    assert info.device.kind == "cpu"
    assert "torch" in info.device.toolchain
    assert info.max_waiting_requests == 256
    assert info.max_prompt_bytes == 1024 * 1024
    assert info.max_prompt_tokens == 131_072
    assert info.max_generated_tokens == 65_536
    assert list(info.compaction_policies) == ["knorm", "knorm_per_head", "knorm_per_layer_head", "sink_recent"]


async def test_load_tells_requests_pages_and_totals(served):
    idle = await served.engine_load()
    assert (idle.pages_total, idle.pages_free, idle.requests_running) == (64, 64, 0)
    served.gate.close()
    call = served.inference.Generate(generate(PROMPT, 50))
    await call.read()
    served.gate.let_through(3)  # the prompt, then two tokens
    await served.gate.until_held()
    busy = await served.engine_load()
    assert (busy.requests_running, busy.requests_waiting, busy.pages_free) == (1, 0, 64 - 2)
    assert (busy.steps, busy.prompt_tokens, busy.generated_tokens) == (3, 5, 3)
    call.cancel()
    served.gate.open()
    await served.until_ended(1)


async def test_compaction_stats_are_per_engine(served):
    await served.load(LINEAR_ID, name="linear", num_pages=5)
    kv = inference.KVOptions(policy=inference.CompactionOptions(name="knorm", budget=8, interval=4))
    await served.events(generate(PROMPT, 40, engine="linear", kv=kv))
    every = (await served.control.GetCompactionStats(pb.GetCompactionStatsRequest())).engines
    assert [stats.engine for stats in every] == ["tiny", "linear"]
    assert every[0] == pb.CompactionStats(engine="tiny")
    assert (every[1].rounds, every[1].tokens_evicted) == (8, 32)
    assert every[1].bytes_moved > 0
    one = (await served.control.GetCompactionStats(pb.GetCompactionStatsRequest(engine="linear"))).engines
    assert [stats.engine for stats in one] == ["linear"]
    await refused(served.control.GetCompactionStats(pb.GetCompactionStatsRequest(engine="other")), "MODEL_NOT_FOUND")

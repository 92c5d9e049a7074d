"""What a runtime serves from its start on: the engines of its settings, and those it served when it ended."""

import asyncio
import contextlib
import json
import threading

import grpc
import pytest

from runtime_service.config import RuntimeSettings
from runtime_service.service import engines, probes
from runtime_service.service.roster import MAX_ATTEMPTS
from shared.artifacts.local import LocalStore
from shared.errors import ArtifactNotFound, FieldOutOfRange, StoreUnavailable
from shared.pb.quire.v1 import control_pb2 as pb
from shared.pb.quire.v1 import inference_pb2, inference_pb2_grpc
from shared.rpc.status import from_rpc_error
from shared.service_main import read_settings
from tests.contract.runtime.conftest import LINEAR_ID, NUM_PAGES, PAGED_ID, Gate, TinyLoader, generate, serve, tokens_of
from tests.contract.runtime.test_health import NOT_SERVING, SERVING, health, until
from tests.support.tiny_engine import Oracle

PROMPT = [3, 1, 4, 1, 5]
CHAT = {"artifact_id": PAGED_ID, "name": "chat", "num_pages": NUM_PAGES}


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr(probes, "POLL_S", 0.005)
    monkeypatch.setattr(engines, "STORE_RETRY_S", 0.0)


async def names(served):
    return [engine.name for engine in (await served.control.ListEngines(pb.ListEnginesRequest())).engines]


async def test_what_was_loaded_comes_back_as_it_was_and_what_was_unloaded_does_not(tmp_path):
    compaction = pb.CompactionDefaults(name="sink_recent", budget=16, interval=4)
    async with serve(tmp_path) as served:
        first = await served.load(default_compaction=compaction, prefix_caching=False)
        await served.load(LINEAR_ID, name="linear", num_pages=3)
        await served.load(name="gone")
        await served.control.UnloadEngine(pb.UnloadEngineRequest(name="gone"))
    async with serve(tmp_path) as served:
        await served.runtime.started()
        back, linear = (await served.control.ListEngines(pb.ListEnginesRequest())).engines
        back.load_s = first.load_s
        assert back == first
        assert (linear.name, linear.num_pages) == ("linear", 3)
        assert tokens_of(await served.events(generate(PROMPT, kv=inference_pb2.KVOptions(off=True)))) == Oracle().expected_tokens(
            PROMPT, 8
        )


async def test_ready_only_when_the_engines_of_the_settings_are_loaded(tmp_path):
    """BR-168: live at once, ready when it can serve; until then clients hear that it is starting, and when to come again."""
    loader = TinyLoader(Gate())
    loader.allowed.clear()
    async with serve(tmp_path, loader=loader, engines=(CHAT,)) as served:
        await until(served, "liveness", SERVING)
        assert await health(served, "readiness") == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.events(generate(PROMPT, engine="chat"))
        error = from_rpc_error(caught.value)
        assert (error.reason, error.retryable, error.retry_after_s is not None) == ("STARTING", True, True)
        loader.allowed.set()
        await served.runtime.started()
        await until(served, "readiness", SERVING)
        assert tokens_of(await served.events(generate(PROMPT, engine="chat"))) == Oracle().expected_tokens(PROMPT, 8)


async def test_an_engine_of_the_settings_that_cannot_be_loaded_ends_the_start(tmp_path):
    async with serve(tmp_path, engines=(CHAT | {"artifact_id": "9" * 64},)) as served:
        with pytest.raises(ArtifactNotFound):
            await served.runtime.started()
        assert await health(served, "readiness") == NOT_SERVING


async def test_an_engine_that_is_gone_does_not_keep_the_others_from_being_served(tmp_path):
    async with serve(tmp_path) as served:
        await served.load(name="one")
        await served.load(LINEAR_ID, name="two", num_pages=3)
    roster = tmp_path / "runtime-engines.json"
    roster.write_text(roster.read_text().replace(PAGED_ID, "9" * 64))
    for _ in range(2):
        async with serve(tmp_path) as served:
            await served.runtime.started()
            await until(served, "readiness", SERVING)
            assert await names(served) == ["two"]


async def test_an_engine_whose_loading_fails_by_a_bug_does_not_either(tmp_path):
    class Broken(TinyLoader):
        def load(self, engine, model):
            if engine.artifact_id == PAGED_ID:
                raise RuntimeError("a library that is not to be read")
            return super().load(engine, model)

    async with serve(tmp_path) as served:
        await served.load(name="one")
        await served.load(LINEAR_ID, name="two", num_pages=3)
    async with serve(tmp_path, loader=Broken(Gate())) as served:
        await served.runtime.started()
        await until(served, "readiness", SERVING)
        assert await names(served) == ["two"]


async def test_the_settings_win_over_what_was_loaded_under_their_name(tmp_path):
    async with serve(tmp_path) as served:
        await served.load(LINEAR_ID, name="chat", num_pages=3)
    async with serve(tmp_path, engines=(CHAT,)) as served:
        await served.runtime.started()
        (engine,) = (await served.control.ListEngines(pb.ListEnginesRequest())).engines
        assert engine.artifact_id == PAGED_ID


async def test_a_store_that_does_not_answer_is_waited_for(tmp_path, monkeypatch):
    opened, outages = LocalStore.open, iter(range(3))

    def open_late(store, artifact_id):
        if next(outages, None) is not None:
            raise StoreUnavailable("the bucket does not answer")
        return opened(store, artifact_id)

    monkeypatch.setattr(LocalStore, "open", open_late)
    async with serve(tmp_path, engines=(CHAT,)) as served:
        await served.runtime.started()
        assert await names(served) == ["chat"]


async def test_a_stop_during_the_start_ends_it_and_forgets_nothing(tmp_path, monkeypatch):
    async with serve(tmp_path) as served:
        await served.load(name="one")
        await served.load(LINEAR_ID, name="two", num_pages=3)
    before = json.loads((tmp_path / "runtime-engines.json").read_bytes())

    def never(store, artifact_id):
        raise StoreUnavailable("the bucket does not answer")

    with monkeypatch.context() as patched:
        patched.setattr(LocalStore, "open", never)
        async with serve(tmp_path):
            await asyncio.sleep(0)
    after = json.loads((tmp_path / "runtime-engines.json").read_bytes())
    assert sorted(map(json.dumps, after)) == sorted(map(json.dumps, before))


class SlowLoader(TinyLoader):
    """Takes until `done` over the linear engine."""

    def __init__(self, gate):
        super().__init__(gate)
        self.done = threading.Event()

    def load(self, engine, model):
        if engine.artifact_id == LINEAR_ID:
            assert self.done.wait(60), "the load was waited for"
        return super().load(engine, model)


async def test_a_load_that_takes_long_keeps_no_drain_waiting(tmp_path):
    """SIGTERM while an engine is being brought back: streams of another end as retryable, not with the process."""
    gate = Gate()
    loader = SlowLoader(gate)
    async with contextlib.AsyncExitStack() as outlives:
        async with serve(tmp_path, loader=loader, engines=(CHAT | {"artifact_id": LINEAR_ID},)) as served:
            await served.load()
            channel = await outlives.enter_async_context(grpc.aio.insecure_channel(served.runtime.address))
            gate.close()
            call = inference_pb2_grpc.InferenceStub(channel).Generate(generate(PROMPT, 60))
            await gate.until_held()

            async def end():
                while not served.runtime.loop.load().draining:
                    await asyncio.sleep(0.005)
                gate.open()
                last = [event async for event in call][-1]
                loader.done.set()
                return last.error.reason

            ended = asyncio.create_task(end())
        assert await ended == "DRAINING"


class Death(BaseException):
    """Of the process, as far as an exception can stand for that."""


class DeadlyLoader(TinyLoader):
    def load(self, engine, model):
        raise Death


async def test_an_engine_that_takes_the_process_down_is_given_up_after_some_starts(tmp_path):
    async with serve(tmp_path) as served:
        await served.load(name="deadly")
    roster = tmp_path / "runtime-engines.json"
    for attempt in range(1, MAX_ATTEMPTS + 1):
        async with serve(tmp_path, loader=DeadlyLoader(Gate())) as served:
            with pytest.raises(Death):
                await served.runtime.started()
        entries = json.loads(roster.read_bytes())
        assert [entry["attempts"] for entry in entries] == [attempt]
    async with serve(tmp_path, loader=DeadlyLoader(Gate())) as served:
        await served.runtime.started()
        assert await names(served) == []
        while await health(served, "readiness") != SERVING:
            await asyncio.sleep(0.01)  # the next look at the engines says so


@pytest.mark.parametrize("content", ["", "{", '[{"request": 1}]', "[" * 10_000, '[{"request": {"artifact_id": "x", "name": "x"}}]'])
async def test_a_damaged_list_of_engines_does_not_keep_the_runtime_down(tmp_path, content):
    (tmp_path / "runtime-engines.json").write_text(content)
    async with serve(tmp_path) as served:
        await served.load()
        assert await names(served) == ["tiny"]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"artifact_id": "x"}, "artifact_id must be 64 lower-case hex digits"),
        ({"name": "../x"}, "name must be 1 to 128"),
        ({"pages": 3}, "pages"),
        ({"num_pages": 1}, "num_pages must be at least 2"),
        ({"kv_bytes": 1}, "num_pages or kv_bytes, not both"),
    ],
)
def test_bad_engines_in_the_settings_are_named(monkeypatch, changes, complaint):
    monkeypatch.setenv("QUIRE_RUNTIME_ENGINES", json.dumps([CHAT | changes]))
    with pytest.raises(FieldOutOfRange, match=f"bad settings: .*{complaint}"):
        read_settings(RuntimeSettings)

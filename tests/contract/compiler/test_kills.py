"""kill -9 at random moments of compiler services, of their builds and of redis-server, seen by clients over gRPC.

Jobs wait, run, publish and are cancelled meanwhile. Every accepted job ends exactly once, watchers resume without gaps, no artifact
is half published or published twice. QUIRE_KILL_ROUNDS is the number of kills (`make soak` asks for 200), QUIRE_KILL_SEED chooses
victims and moments.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from compiler_service.service.convert import spec_from
from compiler_service.spec import encode_spec
from shared.artifacts.locate import StoreLocation, open_store
from shared.artifacts.store import ArtifactStore
from shared.pb.quire.v1 import compiler_pb2 as pb
from shared.pb.quire.v1 import compiler_pb2_grpc
from tests.support.artifact_stores import BUCKET, s3_environment, s3_server
from tests.support.compiler_replicas import MAX_ATTEMPTS, Replica, channel_to, create_request, replicas, stub_of, write_source
from tests.support.redis_server import RedisServer

ROUNDS = int(os.environ.get("QUIRE_KILL_ROUNDS", "4"))
SEED = int(os.environ.get("QUIRE_KILL_SEED", "1"))
TERMINAL = range(pb.JOB_STATE_SUCCEEDED, pb.JOB_STATE_DEAD_LETTERED + 1)
LEASE_S = 2.0


class Client:
    """Speaks to any service that answers, and repeats itself where none did."""

    def __init__(self, stubs: list[compiler_pb2_grpc.CompilerStub], rng: random.Random) -> None:
        self._stubs, self._rng = stubs, rng
        self.seen: dict[str, list[pb.JobEvent]] = {}
        self.max_lens: dict[str, int] = {}
        self._watching: list[asyncio.Task[None]] = []

    @property
    def stub(self) -> compiler_pb2_grpc.CompilerStub:
        return self._rng.choice(self._stubs)

    async def submit(self, request_id: str, max_len: int) -> None:
        while True:
            with outage_allowed():
                job = (await self.stub.CreateCompileJob(create_request(request_id, "m", max_len))).job
                break
            await asyncio.sleep(0.05)
        if job.job_id not in self.seen:
            self.seen[job.job_id], self.max_lens[job.job_id] = [], max_len
            self._watching.append(asyncio.create_task(self._watch(job.job_id)))

    async def cancel_some(self) -> None:
        with outage_allowed():  # nothing was promised then
            await self.stub.CancelCompileJob(pb.CancelCompileJobRequest(job_id=self._rng.choice(list(self.seen))))

    async def _watch(self, job_id: str) -> None:
        seen = self.seen[job_id]
        while not (seen and seen[-1].state in TERMINAL):
            with outage_allowed():
                async for response in self.stub.WatchCompileJob(pb.WatchCompileJobRequest(job_id=job_id, after_sequence=len(seen))):
                    seen.append(response.event)
            await asyncio.sleep(0.05)

    async def progress(self) -> None:
        """Until one more job has succeeded, or none is left that could."""
        before = self._count(pb.JOB_STATE_SUCCEEDED)
        while self._count(pb.JOB_STATE_SUCCEEDED) == before and self._count(*TERMINAL) < len(self.seen):
            await asyncio.sleep(0.05)

    def _count(self, *states: int) -> int:
        return sum(bool(events) and events[-1].state in states for events in self.seen.values())

    async def all_ended(self) -> None:
        await asyncio.gather(*self._watching)


@contextlib.contextmanager
def outage_allowed() -> Iterator[None]:
    """A service or the queue behind it was away; anything else is a failure."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise


@dataclass
class Setting:
    """What a service stands on. `count`: SQLite is one host's, so one service has it."""

    count: int
    environment: dict[str, str]
    store: StoreLocation
    redis: RedisServer | None = None
    victims: list[str] = field(default_factory=list)


@pytest.fixture(params=["sqlite", "redis"])
def setting(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setting]:
    cache = str(tmp_path / "cache")
    with contextlib.ExitStack() as stack:
        if request.param == "sqlite":
            place = str(tmp_path / "store")
            yield Setting(1, {"QUIRE_COMPILER_STORE": place}, StoreLocation(place, cache, 0), None, ["service", "build"])
            return
        server = RedisServer()
        stack.callback(server.close)
        aws = s3_environment(stack.enter_context(s3_server()))
        for name, value in aws.items():
            monkeypatch.setenv(name, value)
        place = f"s3://{BUCKET}/kills"
        environment = {"QUIRE_COMPILER_REDIS_URL": server.url, "QUIRE_COMPILER_STORE": place}
        yield Setting(2, environment, StoreLocation(place, cache, 1 << 30), server, ["service", "build", "redis"])


async def kill(victim: str, setting: Setting, services: list[Replica], rng: random.Random) -> None:
    if victim == "redis":
        assert setting.redis is not None
        setting.redis.kill()
        await asyncio.sleep(rng.random() / 2)
        await asyncio.to_thread(setting.redis.start)
    elif victim == "service":
        rng.choice(services).kill()
    else:
        for build in rng.choice(services).builds()[:1]:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself
                os.kill(build, signal.SIGKILL)


async def keep_up(services: list[Replica]) -> None:
    while True:
        for service in services:
            service.keep_up()
        await asyncio.sleep(0.1)


@pytest.mark.timeout(400 + 10 * ROUNDS)
async def test_nothing_is_lost_or_done_twice_whoever_is_killed(setting: Setting, tmp_path: Path) -> None:
    rng, log = random.Random(SEED), tmp_path / "log"
    log.touch()
    write_source(tmp_path / "models", "m", publish={"size": 50_000, "log": str(log), "pause": 0.3})
    options = setting.environment | {"QUIRE_COMPILER_BUILD_SLOTS": "2"}
    with replicas(setting.count, tmp_path / "models", options, lease_s=LEASE_S) as services:
        channels = [channel_to(service) for service in services]
        client = Client([stub_of(channel) for channel in channels], rng)
        keeping = asyncio.create_task(keep_up(services))
        for number in range(ROUNDS):
            for part in range(4):
                await client.submit(f"r-{number}-{part}", 256 + 2 * number + part // 2)  # half of them duplicates
            if rng.random() < 0.9:  # else a service may die while it starts
                while not all(service.is_up for service in services):
                    await asyncio.sleep(0.05)
            if rng.random() < 0.5:  # however slow the machine is, some builds come through
                await client.progress()
            await asyncio.sleep(rng.random() * 1.5)
            await client.cancel_some()
            await kill(setting.victims[number % len(setting.victims)], setting, services, rng)
        await client.all_ended()
        await check_jobs(client)
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping
        for channel in channels:
            await channel.close()
    check_store(client, open_store(setting.store), log.read_text().split())


async def check_jobs(client: Client) -> None:
    """Each watcher has seen exactly the job's whole history, and that ends once."""
    for job_id, events in client.seen.items():
        job = (await client.stub.GetCompileJob(pb.GetCompileJobRequest(job_id=job_id), wait_for_ready=True)).job
        whole = [r.event async for r in client.stub.WatchCompileJob(pb.WatchCompileJobRequest(job_id=job_id), wait_for_ready=True)]
        assert events == whole
        assert [event.sequence for event in events] == list(range(1, len(events) + 1))
        assert [event.state in TERMINAL for event in events].count(True) == 1
        assert events[-1].state == job.state
        if job.state not in (pb.JOB_STATE_SUCCEEDED, pb.JOB_STATE_CANCELLED):
            assert (job.state, job.attempt) == (pb.JOB_STATE_DEAD_LETTERED, MAX_ATTEMPTS), job.error
    request = pb.ListCompileJobsRequest(page_size=500)
    listed = []
    while True:
        page = await client.stub.ListCompileJobs(request, wait_for_ready=True)
        listed += [job.job_id for job in page.jobs]
        if not page.next_page_token:
            break
        request.page_token = page.next_page_token
    assert sorted(listed) == sorted(client.seen), "no job but those that were acknowledged, and all of them"


def check_store(client: Client, store: ArtifactStore, published: list[str]) -> None:
    assert len(published) == len(set(published)), "an artifact was published twice"
    succeeded = {job_id for job_id, events in client.seen.items() if events[-1].state == pb.JOB_STATE_SUCCEEDED}
    assert succeeded, "something got done between the kills"
    for job_id in succeeded:
        text = encode_spec(spec_from(create_request("r", "m", client.max_lens[job_id]).spec))
        assert client.seen[job_id][-1].artifact_id == hashlib.sha256(text).hexdigest()
    present = {info.artifact_id for info in store.list()}
    assert {client.seen[job_id][-1].artifact_id for job_id in succeeded} <= present
    for artifact_id in present:
        store.verify(artifact_id)

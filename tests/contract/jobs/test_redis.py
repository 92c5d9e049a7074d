"""What only Redis can do wrong: eviction, lost streams and groups, deliveries nobody took, memory, restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import redis
import structlog.testing

from shared.errors import FieldOutOfRange, QueueFull, StoreUnavailable
from shared.jobs.job import HeartbeatAnswer, JobState
from shared.jobs.queue import QueuePolicy
from shared.jobs.redis import CONNECTIONS, RedisQueue
from tests.support.job_queues import ERROR, Backend, claim, redis_backend, submit, succeed
from tests.support.redis_server import RedisServer

READY, JOB = "{quire}:ready", "{quire}:job:"


@pytest.fixture
async def backend(redis_server: RedisServer) -> AsyncIterator[Backend]:
    made = redis_backend(redis_server)
    yield made
    await made.close()


@pytest.fixture
def server(redis_server: RedisServer) -> Iterator[Any]:
    """The server seen from behind the queue's back."""
    with redis.Redis.from_url(redis_server.url) as client:
        yield client


@pytest.fixture
def own_server() -> Iterator[RedisServer]:
    """A server a test may kill or fill."""
    made = RedisServer()
    yield made
    made.close()


async def test_a_server_that_may_evict_jobs_is_refused(redis_server: RedisServer, server: Any) -> None:
    """BR-136: any policy but noeviction may drop streams and their groups."""
    for policy in ("allkeys-lru", "volatile-ttl"):
        server.config_set("maxmemory-policy", policy)
        try:
            with pytest.raises(StoreUnavailable, match=f"must be noeviction, it is {policy}"):
                await RedisQueue.connect(redis_server.url)
        finally:
            server.config_set("maxmemory-policy", "noeviction")


@pytest.mark.parametrize(("setting", "lax", "strict"), [("appendonly", "no", "yes"), ("appendfsync", "everysec", "always")])
async def test_a_server_that_may_forget_accepted_jobs_is_warned_of(
    redis_server: RedisServer, server: Any, setting: str, lax: str, strict: str
) -> None:
    """Found by killing: with everysec an answer may leave before its line is in the file."""
    server.config_set(setting, lax)
    try:
        with structlog.testing.capture_logs() as logs:
            await (await RedisQueue.connect(redis_server.url)).close()
        assert [line["log_level"] for line in logs] == ["warning"]
        assert "may lose accepted jobs" in logs[0]["event"]
    finally:
        server.config_set(setting, strict)
    with structlog.testing.capture_logs() as logs:
        await (await RedisQueue.connect(redis_server.url)).close()
    assert logs == []


async def test_a_server_that_is_not_there_is_said_to_be() -> None:
    with pytest.raises(StoreUnavailable):
        await RedisQueue.connect("unix:///nowhere/socket")


async def test_what_is_no_url_of_a_server_is_refused_and_not_shown() -> None:
    with pytest.raises(FieldOutOfRange, match="redis_url must be like") as refusal:
        await RedisQueue.connect("redis://:secret@host:port")
    assert "secret" not in refusal.value.message


async def test_out_of_memory_refuses_new_jobs_and_lets_the_others_end(own_server: RedisServer) -> None:
    """BR-136: submit fails RESOURCE_EXHAUSTED; what was accepted is still worked off, and makes room."""
    backend = redis_backend(own_server)
    queue = await backend.open()
    accepted = [(await submit(queue, f"r-{n}", f"d-{n}")).job.job_id for n in range(3)]
    with redis.Redis.from_url(own_server.url) as client:
        client.config_set("maxmemory", 1)
        with pytest.raises(QueueFull, match="memory"):
            await submit(queue, "one-more", "one-more")
        first = await claim(queue)
        assert await queue.heartbeat(first.token) == "continue"
        await queue.record_event(first.token, stage="build")
        await queue.fail_attempt(first.token, ERROR)
        backend.clock.advance(10)
        for _ in accepted:
            await succeed(queue, await claim(queue))
        await queue.reclaim()
        client.config_set("maxmemory", 0)
    assert (await queue.count())[JobState.SUCCEEDED] == 3
    assert (await submit(queue, "one-more", "one-more")).created
    await backend.close()


async def test_a_lost_group_is_made_again_from_the_start(backend: Backend, server: Any) -> None:
    """BR-136: from the start, not from now: what waited is not skipped."""
    queue = await backend.open()
    ids = [(await submit(queue, f"r-{n}", f"d-{n}")).job.job_id for n in range(3)]
    running = await claim(queue)
    server.xgroup_destroy(READY, "workers")
    assert await queue.heartbeat(running.token) == "continue"
    claims = [await claim(queue), await claim(queue)]
    assert [claimed.job.job_id for claimed in claims] == ids[1:]
    assert await queue.claim("w") is None, "the running job is not handed out again"
    for claimed in (running, *claims):
        await succeed(queue, claimed)


async def test_a_lost_stream_is_filled_again_from_the_records(backend: Backend, server: Any) -> None:
    queue = await backend.open()
    ids = [(await submit(queue, f"r-{n}", f"d-{n}")).job.job_id for n in range(3)]
    server.delete(READY)
    await queue.reclaim()
    assert {(await claim(queue)).job.job_id for _ in ids} == set(ids)
    assert await queue.claim("w") is None


async def test_a_delivery_whose_worker_died_before_it_claimed_is_handed_out_again(backend: Backend, server: Any) -> None:
    """The window between XREADGROUP and the claim: the job waits, its message is pending with a dead consumer."""
    queue = await backend.open(QueuePolicy(lease_s=0.05))
    job_id = (await submit(queue)).job.job_id
    assert server.xreadgroup("workers", "dead", {READY: ">"}, count=1)
    assert await queue.claim("w") is None
    await asyncio.sleep(0.06)  # the server measures how long a message has been idle
    await queue.reclaim()
    claimed = await claim(queue)
    assert (claimed.job.job_id, claimed.job.attempt) == (job_id, 1)
    assert server.xpending(READY, "workers")["pending"] == 1


async def test_messages_of_running_jobs_are_left_alone_however_idle(backend: Backend, server: Any) -> None:
    queue = await backend.open(QueuePolicy(lease_s=0.01))
    await submit(queue)
    claimed = await claim(queue)
    await asyncio.sleep(0.05)
    await queue.reclaim()
    assert server.xpending(READY, "workers")["pending"] == 1
    assert await queue.claim("w") is None
    await succeed(queue, claimed)


async def test_heartbeats_reset_the_idle_time_of_the_message(backend: Backend, server: Any) -> None:
    """BR-127: others see from the stream alone that the job is being worked on; the delivery count stays."""
    queue = await backend.open()
    await submit(queue)
    claimed = await claim(queue, "a")
    await asyncio.sleep(0.05)
    await queue.heartbeat(claimed.token)
    (pending,) = server.xpending_range(READY, "workers", "-", "+", 10)
    assert pending["consumer"] == b"a"
    assert pending["time_since_delivered"] < 50
    assert pending["times_delivered"] == 1


async def test_broken_messages_and_records_do_not_stop_the_others(backend: Backend, server: Any) -> None:
    """BR-129: a message of no job, one without a field, a record nobody can read; then a healthy job."""
    queue = await backend.open()
    server.xadd(READY, {"job": "no-such-job"})
    server.xadd(READY, {"other": "field"})
    broken = (await submit(queue, "r-1", "d-1", max_pending_s=5)).job.job_id
    server.hset(JOB + broken, "record", b'{"from":"the future"}')
    healthy = (await submit(queue, "r-2", "d-2")).job.job_id
    lapsing = (await submit(queue, "r-3", "d-3", max_pending_s=6)).job.job_id
    assert (await claim(queue)).job.job_id == healthy
    backend.clock.advance(10)
    assert (await queue.reclaim()).expired == 1
    assert (await queue.get(lapsing)).state is JobState.TIMED_OUT
    assert [job.job_id for job in (await queue.list()).jobs] == [lapsing, healthy]


async def test_a_retry_that_becomes_due_is_announced_once(backend: Backend, server: Any) -> None:
    queue = await backend.open()
    await submit(queue)
    await queue.fail_attempt((await claim(queue)).token, ERROR)
    backend.clock.advance(10)
    for _ in range(3):
        await queue.reclaim()
    assert (server.xlen(READY), server.zcard("{quire}:delayed")) == (1, 0)


async def test_a_second_message_for_a_job_is_dropped(backend: Backend, server: Any) -> None:
    queue = await backend.open()
    job_id = (await submit(queue)).job.job_id
    server.xadd(READY, {"job": job_id})
    await claim(queue)
    assert await queue.claim("w") is None
    assert server.xlen(READY) == server.xpending(READY, "workers")["pending"] == 1


async def test_a_listing_longer_than_one_look_at_the_index(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.jobs.redis._SCAN", 2)
    queue = await backend.open()
    ids = [(await submit(queue, f"r-{n}", f"d-{n}")).job.job_id for n in range(7)]
    await queue.cancel(ids[3])
    page = await queue.list(states=[JobState.QUEUED], page_size=5)
    rest = await queue.list(states=[JobState.QUEUED], page_size=5, page_token=page.next_page_token)
    assert [job.job_id for job in page.jobs + rest.jobs] == [i for i in reversed(ids) if i != ids[3]]


async def test_the_stream_is_bounded_by_what_waits_or_runs(backend: Backend, server: Any) -> None:
    queue = await backend.open()
    for number in range(30):
        await submit(queue, f"r-{number}", f"d-{number}")
        claimed = await claim(queue)
        await queue.fail_attempt(claimed.token, ERROR)
        backend.clock.advance(10)
        if number % 2:
            await queue.cancel(claimed.job.job_id)
        else:
            await succeed(queue, await claim(queue))
    assert server.xlen(READY) == 0
    assert server.xpending(READY, "workers")["pending"] == 0
    assert server.scard("{quire}:queued") == server.zcard("{quire}:delayed") == 0


async def test_a_forgotten_job_leaves_no_key_behind(backend: Backend, server: Any) -> None:
    queue = await backend.open()
    await submit(queue)
    await submit(queue, "request-2")
    await succeed(queue, await claim(queue))
    backend.clock.advance(QueuePolicy().retention_s + 1)
    await queue.reclaim()
    assert sorted(server.keys("*")) == [b"{quire}:counts", b"{quire}:number", READY.encode()]


async def test_only_a_consumer_without_messages_is_deleted(backend: Backend, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """BR-128: deleting a consumer deletes what it was given."""
    monkeypatch.setattr("shared.jobs.redis.CONSUMER_RETENTION_S", 0.01)
    queue = await backend.open()
    await submit(queue, "r-1", "d-1")
    await submit(queue, "r-2", "d-2")
    await succeed(queue, await claim(queue, "idle"))
    busy = await claim(queue, "busy")
    await asyncio.sleep(0.05)
    await queue.reclaim()
    assert [consumer["name"] for consumer in server.xinfo_consumers(READY, "workers")] == [b"busy"]
    await succeed(queue, busy)


async def test_a_server_killed_and_restarted_has_lost_nothing(own_server: RedisServer) -> None:
    """kill -9 with the append-only file on: waiting, running, delayed and ended jobs, claims and histories are all there."""
    backend = redis_backend(own_server)
    queue = await backend.open()
    for number in range(5):
        await submit(queue, f"r-{number}", f"d-{number}")
    await succeed(queue, await claim(queue))
    running = await claim(queue)
    await queue.fail_attempt((await claim(queue)).token, ERROR)
    before = (await queue.list()).jobs
    own_server.kill()
    with pytest.raises(StoreUnavailable):
        await queue.get(before[0].job_id)
    own_server.start()
    assert (await queue.list()).jobs == before
    assert (await succeed(queue, running)).state is JobState.SUCCEEDED
    backend.clock.advance(10)
    for _ in range(3):
        await succeed(queue, await claim(queue))
    assert (await queue.count())[JobState.SUCCEEDED] == 5
    await backend.close()


async def test_times_are_the_servers(redis_server: RedisServer, server: Any) -> None:
    """Without a clock of its own the queue does not trust the host's."""
    queue = await RedisQueue.connect(redis_server.url)
    server.flushall()
    before = server.time()
    job = (await submit(queue)).job
    after = server.time()
    assert before[0] + before[1] / 1e6 <= job.created_s <= after[0] + after[1] / 1e6
    await queue.close()


async def test_a_cancelled_task_ends_whenever_the_cancellation_comes(backend: Backend) -> None:
    """`asyncio.wait_for` of Python 3.11, which redis-py sends with, swallows some; a worker's heartbeat then never ended."""
    queue = await backend.open(real_time=True)
    await submit(queue)
    token = (await claim(queue)).token

    async def beat() -> None:
        while True:
            await queue.heartbeat(token)

    for turn in range(300):
        task = asyncio.create_task(beat())
        for _ in range(turn % 60):  # so many turns of the loop into it
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asyncio.shield(task), 5.0)


async def test_any_number_of_watchers_takes_turns_on_a_bounded_number_of_connections(backend: Backend, server: Any) -> None:
    """redis-py's own pool refuses the hundred-and-first command at the same time: a heartbeat's, as well as a watcher's."""
    queue = await backend.open()
    job_id = (await submit(queue)).job.job_id
    token = (await claim(queue)).token
    seen = await asyncio.gather(*(queue.get(job_id) for _ in range(500)), queue.heartbeat(token))
    assert {job.job_id for job in seen[:-1]} == {job_id}
    assert seen[-1] is HeartbeatAnswer.CONTINUE
    assert server.info("clients")["connected_clients"] <= CONNECTIONS + 20

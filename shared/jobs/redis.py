"""The job queue on Redis: several hosts share one. Streams with a consumer group hand jobs out, Lua keeps each step atomic.

Redis must keep what it accepted: `maxmemory-policy noeviction` is required, `appendonly yes` with `appendfsync always` is
expected. Times are the server's clock, so that hosts need not agree on theirs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import redis.asyncio
import structlog
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

from shared.errors import DuplicateRequest, FieldOutOfRange, QueueFull, StoreUnavailable
from shared.jobs import lifecycle, redis_scripts
from shared.jobs.job import Job, JobEvent, JobState, decode_event, decode_job, encode
from shared.jobs.lifecycle import Change
from shared.jobs.queue import QueuePolicy, Submission
from shared.jobs.stored import StoredQueue, readable

CONNECTIONS = 100
"""Of one process; more commands at the same time wait for one. A worker that waits for a job holds one, 64 at most."""
CONSUMER_RETENTION_S = 3600.0
_PREFIX = "{quire}:"
_GROUP = "workers"
_BLOCK_S = 1.0
"""A waiting worker looks this often whether a delayed job has become available. Under the client's socket timeout."""
_SCAN = 500

_log = structlog.get_logger(__name__)


class RedisQueue(StoredQueue):
    """JobQueue on an open client. Use `RedisQueue.connect`. `clock` replaces the server's in tests."""

    def __init__(self, client: redis.asyncio.Redis, policy: QueuePolicy, clock: Callable[[], float] | None) -> None:
        super().__init__(policy)
        self._client, self._clock = client, clock
        self._scripts = {
            text: client.register_script(text)
            for text in (
                redis_scripts.COMMIT,
                redis_scripts.INSERT,
                redis_scripts.FORGET,
                redis_scripts.PROMOTE,
                redis_scripts.REPAIR,
            )
        }

    @classmethod
    async def connect(
        cls,
        url: str,
        policy: QueuePolicy | None = None,
        *,
        clock: Callable[[], float] | None = None,
    ) -> RedisQueue:
        """Open `redis://`, `rediss://` or `unix://`. StoreUnavailable for a server that does not answer or may evict jobs,
        FieldOutOfRange for what is no URL of one."""
        try:
            pool = redis.asyncio.BlockingConnectionPool.from_url(
                url, max_connections=CONNECTIONS, timeout=10.0, socket_timeout=10.0, socket_connect_timeout=5.0
            )
        except ValueError as error:  # the URL may hold a password, so no message shows it
            raise FieldOutOfRange(f"redis_url must be like redis://host:6379/0; {error}", field="redis_url") from error
        client = redis.asyncio.Redis.from_pool(pool)
        queue = cls(client, policy or QueuePolicy(), clock)
        try:
            with _translated():
                await queue._check_server()
                await queue._repair(await queue._now())
        except BaseException:
            await client.aclose()
            raise
        return queue

    async def _check_server(self) -> None:
        info: dict[str, Any] = await self._client.info()
        version = str(info.get("redis_version"))
        if int(version.partition(".")[0]) < 7:
            raise StoreUnavailable(f"Redis 7 or newer is needed, this server is {version}; use another one, or a queue in a file")
        policy = info.get("maxmemory_policy")
        if policy != "noeviction":
            raise StoreUnavailable(
                f"Redis may evict accepted jobs: maxmemory-policy must be noeviction, it is {policy}; "
                "set it (CONFIG SET maxmemory-policy noeviction) or use a server of its own",
                details={"field": "maxmemory-policy", "expected": "noeviction", "got": str(policy)},
            )
        try:
            sync = (await self._client.config_get("appendfsync")).get("appendfsync", "unknown")
        except ResponseError:  # managed servers forbid CONFIG
            sync = "unknown"
        if not info.get("aof_enabled") or sync != "always":
            # NOTE with `everysec` the file is written after the answer whenever an earlier sync is still under way.
            _log.warning(
                "redis may lose accepted jobs when it is killed; set appendonly yes and appendfsync always",
                appendonly=bool(info.get("aof_enabled")),
                appendfsync=sync,
            )

    async def close(self) -> None:
        await self._client.aclose()

    async def count(self) -> Mapping[JobState, int]:
        with _translated():
            values = await _reply(self._client.hmget(_PREFIX + "counts", list(JobState)))
        return {state: int(value or 0) for state, value in zip(JobState, values, strict=True)}

    async def _now(self) -> float:
        if self._clock is not None:
            return self._clock()
        with _translated():
            seconds, microseconds = await _reply(self._client.time())
        return float(seconds + microseconds / 1e6)

    async def _insert(self, change: Change, *, reuse_finished: bool) -> Submission:
        job = change.job
        extra = (job.request_id, job.request_digest, str(int(reuse_finished)), str(self._policy.max_queued))
        with _translated():
            try:
                kind, value = await self._run(redis_scripts.INSERT, *self._fields(job, job.created_s), *extra, *_history(change))
            except OutOfMemoryError as error:
                raise QueueFull(f"Redis has no memory left for another job: {error}") from error
        match kind:
            case b"created":
                return Submission(job=job, created=True)
            case b"found":
                return Submission(job=decode_job(value), created=False)
            case b"duplicate":
                raise DuplicateRequest(f"request {job.request_id} was made before with another spec; choose another request_id")
            case _:
                raise QueueFull(f"{value} jobs wait already (at most {self._policy.max_queued}); try again later")

    async def _load(self, job_id: str) -> Job | None:
        with _translated():
            record = await _reply(self._client.hget(f"{_PREFIX}job:{job_id}", "record"))
        return None if record is None else decode_job(record)

    async def _commit(self, change: Change) -> bool:
        fields = self._fields(change.job, await self._now())
        with _translated():
            return bool(await self._run(redis_scripts.COMMIT, *fields, *_history(change)))

    async def _forget(self, job: Job) -> bool:
        with _translated():
            return bool(await self._run(redis_scripts.FORGET, job.job_id, str(job.revision)))

    async def _take(self, worker: str, wait_s: float) -> Job | None:
        deadline = time.monotonic() + min(wait_s, _BLOCK_S)
        with _translated():
            await self._run(redis_scripts.PROMOTE, repr(await self._now()))
            while True:
                left_ms = int((deadline - time.monotonic()) * 1000)
                delivered = await self._read_group(worker, left_ms if left_ms > 0 else None)
                if delivered is None:
                    return None
                job = await self._delivered_job(*delivered)
                if job is not None:
                    return job

    async def _read_group(self, worker: str, block_ms: int | None) -> tuple[bytes, str] | None:
        """Message id and job id of the next message nobody was given, or None."""
        ready = _PREFIX + "ready"
        try:
            reply = await _reply(self._client.xreadgroup(_GROUP, worker, {ready: ">"}, count=1, block=block_ms))
        except ResponseError as error:
            if not str(error).startswith("NOGROUP"):
                raise
            await self._repair(await self._now())
            return await self._read_group(worker, block_ms)
        messages = [message for _, batch in (reply.items() if isinstance(reply, dict) else reply or ()) for message in batch]
        if not messages:
            return None
        entry, fields = messages[0]
        return entry, fields.get(b"job", b"").decode()

    async def _delivered_job(self, entry: bytes, job_id: str) -> Job | None:
        """The job a message stands for, if it may be claimed through it. The message of any other is dropped."""
        record, current = await _reply(self._client.hmget(f"{_PREFIX}job:{job_id}", ["record", "entry"]))
        if record is None or current != entry:
            await _reply(self._client.xack(_PREFIX + "ready", _GROUP, entry))
            await _reply(self._client.xdel(_PREFIX + "ready", entry))
            return None
        job = next(readable([record]), None)  # an unreadable one stays pending and comes again, maybe to a newer version
        return job if job is not None and job.state is JobState.QUEUED else None

    async def _repair(self, now: float) -> None:
        with _translated():
            await self._run(redis_scripts.PROMOTE, repr(now))
            await self._run(redis_scripts.REPAIR, str(int(self._policy.lease_s * 1000)), str(int(CONSUMER_RETENTION_S * 1000)))

    async def _due(self, now: float) -> Sequence[str]:
        with _translated():
            ids = await _reply(self._client.zrange(_PREFIX + "due", "-inf", repr(now), byscore=True))
        return [job_id.decode() for job_id in ids]

    async def _page(self, states: Collection[JobState], before: int | None, limit: int) -> Sequence[tuple[int, bytes]]:
        found: list[tuple[int, bytes]] = []
        upper = "+inf" if before is None else f"({before}"
        while len(found) < limit:
            with _translated():
                numbered = await _reply(
                    self._client.zrevrangebyscore(_PREFIX + "numbers", upper, "-inf", 0, _SCAN, withscores=True)
                )
                pipeline = self._client.pipeline(transaction=False)
                for job_id, _ in numbered:
                    pipeline.hmget(f"{_PREFIX}job:{job_id.decode()}", ["state", "record"])
                rows = await pipeline.execute()
            for (_, number), (state, record) in zip(numbered, rows, strict=True):
                if state is not None and (not states or state.decode() in states):
                    found.append((int(number), record))
            if len(numbered) < _SCAN:
                break
            upper = f"({int(numbered[-1][1])}"
        return found[:limit]

    async def _events(self, job_id: str, after_sequence: int) -> Sequence[JobEvent]:
        with _translated():
            rows = await _reply(self._client.xrange(f"{_PREFIX}events:{job_id}", min=f"({after_sequence}-0"))
        return [decode_event(fields[b"event"]) for _, fields in rows]

    async def _run(self, script: str, *args: str | bytes) -> Any:
        return await _reply(self._scripts[script](keys=[_PREFIX], args=args))

    def _fields(self, job: Job, now: float) -> tuple[str | bytes, ...]:
        """What the scripts call id, revision, state, record, digest, joinable, worker, available_s, due_s, now."""
        joinable = str(int(lifecycle.is_joinable(job)))
        times = (repr(job.available_s), repr(lifecycle.due_s(job, self._policy)), repr(now))
        return (job.job_id, str(job.revision), job.state, encode(job), job.spec_digest, joinable, job.worker, *times)


def _history(change: Change) -> list[str | bytes]:
    return [item for event in change.events for item in (str(event.sequence), encode(event))]


async def _reply(call: Awaitable[Any] | Any) -> Any:
    """The reply to a command, which redis-py types for its blocking and its awaitable client at once; here it is the latter.

    NOTE redis-py sends inside `asyncio.wait_for`, which on Python 3.11 swallows a cancellation that arrives as it ends: the task
    would never hear of it and go on for ever.
    """
    reply = await cast("Awaitable[Any]", call)
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
    return reply


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except RedisError as error:
        raise StoreUnavailable(f"the job queue's Redis failed: {error}") from error

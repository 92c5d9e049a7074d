"""From the one setting an operator writes to an open queue."""

from __future__ import annotations

import asyncio
from pathlib import Path

from shared.errors import BackendUnavailable
from shared.jobs.queue import JobQueue, QueuePolicy
from shared.jobs.sqlite import SQLiteQueue

REDIS_SCHEMES = ("redis://", "rediss://", "unix://")


async def open_queue(location: str, policy: QueuePolicy | None = None) -> JobQueue:
    """A Redis queue for `redis://`, `rediss://` and `unix://`; else a SQLite queue in the file of that path.

    StoreUnavailable where it cannot be opened, BackendUnavailable for Redis without the extra `redis`.
    """
    if not location.startswith(REDIS_SCHEMES):
        return await asyncio.to_thread(SQLiteQueue, Path(location), policy)
    try:
        from shared.jobs.redis import RedisQueue  # an extra: most installations have one compiler and no Redis
    except ModuleNotFoundError as error:
        raise BackendUnavailable(f"a Redis queue needs the extra 'redis' (pip install 'quire[redis]'): {error}") from error
    return await RedisQueue.connect(location, policy)

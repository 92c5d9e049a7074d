"""A process of its own that works on a queue, to be killed or suspended by a test: `python -m tests.support.queue_process LOCATION ROLE`.

Roles: `hold` claims one job, prints its id, and on a line from stdin tries to finish it; `drain` finishes jobs until there are
none; `submit` submits jobs for ever. Each prints one line for everything the queue acknowledged.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from typing import Any

from shared.errors import JobStateConflict
from shared.jobs.locate import open_queue
from shared.jobs.queue import JobQueue, QueuePolicy
from tests.support.job_queues import claim, submit, succeed

FAST = QueuePolicy(lease_s=1.0, retry_delay_s=0.05, max_queued=100_000)


async def hold(queue: JobQueue) -> None:
    claimed = await claim(queue, f"worker-{os.getpid()}")
    say(claimed.job.job_id)
    await asyncio.to_thread(sys.stdin.readline)
    try:
        say((await succeed(queue, claimed)).state)
    except JobStateConflict:
        say("conflict")


async def drain(queue: JobQueue) -> None:
    while (claimed := await queue.claim(f"worker-{os.getpid()}")) is not None:
        await succeed(queue, claimed)
        say(claimed.job.job_id)


async def submit_for_ever(queue: JobQueue) -> None:
    for number in itertools.count():
        name = f"{os.getpid()}-{number}"
        submission = await submit(queue, name, f"digest-{name}")
        say(submission.job.job_id)


def say(line: Any) -> None:
    print(line, flush=True)


async def main(location: str, role: str) -> None:
    queue = await open_queue(location, FAST)
    await {"hold": hold, "drain": drain, "submit": submit_for_ever}[role](queue)
    await queue.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))

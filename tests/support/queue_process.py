"""A process of its own that works on a queue, for tests to kill or suspend.

    python -m tests.support.queue_process LOCATION ROLE [STORE]

`hold` claims one job, prints its id, and on a line from stdin tries to finish it. `drain` finishes jobs until none comes for two
seconds. `submit` submits jobs for ever. `serve` works as a compiler replica does, for ever: it builds, publishes to the artifact
store in STORE, sometimes fails, and outlives the queue's outages. Each prints one line for everything the queue acknowledged.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import random
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shared.artifacts.files import describe_files
from shared.artifacts.local import LocalStore
from shared.errors import Cancelled, JobStateConflict, StoreUnavailable
from shared.jobs.job import Claim, HeartbeatAnswer, JobState, Outcome
from shared.jobs.locate import open_queue
from shared.jobs.queue import JobQueue, QueuePolicy
from shared.manifest import canonical_json
from tests.support.job_queues import CANCELLED, ERROR, claim, submit, succeed

FAST = QueuePolicy(lease_s=1.0, retry_delay_s=0.05, max_retry_delay_s=0.2, max_queued=100_000)
NAME = f"worker-{os.getpid()}"


async def hold(queue: JobQueue) -> None:
    claimed = await claim(queue, NAME)
    say(claimed.job.job_id)
    await asyncio.to_thread(sys.stdin.readline)
    try:
        say((await succeed(queue, claimed)).state)
    except JobStateConflict:
        say("conflict")


async def drain(queue: JobQueue) -> None:
    while (claimed := await queue.claim(NAME, wait_s=2.0)) is not None:
        await succeed(queue, claimed)
        say(claimed.job.job_id)


async def submit_for_ever(queue: JobQueue) -> None:
    for number in itertools.count():
        name = f"{os.getpid()}-{number}"
        submission = await submit(queue, name, f"digest-{name}")
        say(submission.job.job_id)


async def serve(queue: JobQueue, store: LocalStore) -> None:
    while True:
        try:
            claimed = await queue.claim(NAME, wait_s=0.2)
            if claimed is None:
                await queue.reclaim()
            else:
                await build(queue, store, claimed)
        except StoreUnavailable:
            await asyncio.sleep(0.05)
        except JobStateConflict:
            continue  # somebody else has the job by now


async def build(queue: JobQueue, store: LocalStore, claimed: Claim) -> None:
    await queue.record_event(claimed.token, stage="build")
    await asyncio.sleep(random.random() * 0.2)
    if await queue.heartbeat(claimed.token) is HeartbeatAnswer.CANCEL:
        await queue.finish(claimed.token, CANCELLED)
        return
    if random.random() < 0.1:
        await queue.fail_attempt(claimed.token, ERROR)
        return
    try:
        await queue.begin_publish(claimed.token)
    except Cancelled:
        await queue.finish(claimed.token, CANCELLED)
        return
    artifact_id = hashlib.sha256(claimed.job.spec_digest.encode()).hexdigest()
    with store.stage() as staged:
        (staged / "engine.bin").write_bytes(os.urandom(100_000))  # no two builds give the same bytes
        files = [asdict(entry) for entry in describe_files(staged)]
        manifest = canonical_json({"artifact_id": artifact_id, "kind": "model", "files": files})
        if store.publish(artifact_id, staged, manifest):
            say(f"published {artifact_id}")
    await queue.finish(claimed.token, Outcome(JobState.SUCCEEDED, artifact_id=artifact_id))


def say(line: Any) -> None:
    print(line, flush=True)


async def open_when_up(location: str) -> JobQueue:
    while True:
        try:
            return await open_queue(location, FAST)
        except StoreUnavailable:
            await asyncio.sleep(0.05)


async def main(location: str, role: str, *store: str) -> None:
    queue = await open_when_up(location)
    match role:
        case "hold":
            await hold(queue)
        case "drain":
            await drain(queue)
        case "submit":
            await submit_for_ever(queue)
        case "serve":
            await serve(queue, LocalStore(Path(store[0])))
    await queue.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

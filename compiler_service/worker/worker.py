"""Claims jobs and runs each attempt in a process of its own; nothing a build does can harm more than its process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import structlog

from compiler_service.worker.attempt import (
    CancelledByCaller,
    ClaimLost,
    Crashed,
    GiveBack,
    Overdue,
    OverMemory,
    Result,
    Retry,
    WorkerStopping,
    settle,
)
from compiler_service.worker.build_process import BuildProcess, Launcher
from compiler_service.worker.protocol import AskToPublish, Failed, Progress, Request, Verb
from compiler_service.worker.record import AttemptObserver, AttemptRecord
from shared.artifacts.locate import StoreLocation
from shared.cgroup import container_memory
from shared.errors import Cancelled, InternalError, JobNotFound, JobStateConflict, QuireError, StoreUnavailable
from shared.jobs.job import Claim, HeartbeatAnswer, Job, JobLimits, Outcome
from shared.jobs.queue import JobQueue
from shared.telemetry.trace import StageClock

CLAIM_WAIT_S = 0.2
"""Longest wait of an idle worker for a job: so long it may take to stop."""
QUEUE_RETRY_S = 1.0
"""Pause before a queue that did not answer is asked again."""
MAX_BEAT_S = 1.0
"""Longest time between two heartbeats: a cancel reaches a build within it."""

MEMORY_CHECK_S = 0.5
RESERVE = 1 / 16
"""Share of a container's memory that builds leave alone: once all is used up the kernel ends the container, service included."""

_log = structlog.get_logger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class BuildPaths:
    """Where builds find and leave things; the same for every job of a service."""

    store: StoreLocation
    digest_cache: str
    model_roots: tuple[str, ...]

    def request(self, verb: Verb, spec: str) -> Request:
        return Request(verb, spec, self.store, self.digest_cache, self.model_roots)


class _Monitor:
    """What is known of a running build from outside."""

    def __init__(self, limits: JobLimits) -> None:
        self._limits = limits
        self.stages = StageClock()
        self.rss_bytes = 0
        self.peak_bytes = 0

    async def watch_memory(self, process: BuildProcess) -> Result:
        """Returns when the build holds more than its limit, or its container is about to run out."""
        while True:
            self.rss_bytes = await asyncio.to_thread(process.rss_bytes)
            self.peak_bytes = max(self.peak_bytes, self.rss_bytes)
            if self.rss_bytes > self._limits.max_host_bytes:
                return OverMemory(self.rss_bytes)
            container = await asyncio.to_thread(container_memory)
            if container is not None and container.left_bytes < RESERVE * container.limit_bytes:
                return OverMemory(self.rss_bytes, container.limit_bytes)
            await asyncio.sleep(MEMORY_CHECK_S)


class Worker:
    """One build at a time. `run()` until `stop()`; several workers may share a queue."""

    def __init__(self, queue: JobQueue, name: str, launcher: Launcher, paths: BuildPaths, on_attempt: AttemptObserver) -> None:
        self._queue, self._name, self._launcher, self._paths = queue, name, launcher, paths
        self._on_attempt = on_attempt
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Claim nothing more; a running build is ended and its job given back."""
        self._stopping.set()

    async def run(self) -> None:
        while not self._stopping.is_set():
            try:
                claim = await self._queue.claim(self._name, wait_s=CLAIM_WAIT_S)
            except StoreUnavailable as error:
                _log.warning("no jobs claimed", worker=self._name, error=str(error))
                await asyncio.sleep(QUEUE_RETRY_S)
                continue
            if claim is not None:
                with structlog.contextvars.bound_contextvars(job_id=claim.job.job_id, attempt=claim.job.attempt):
                    await self._run_job(claim)

    async def _run_job(self, claim: Claim) -> None:
        job, begun_s = claim.job, time.monotonic()
        monitor = _Monitor(job.limits)
        _log.info("build started", worker=self._name)
        request = self._paths.request(Verb.BUILD, job.spec.decode())
        try:
            async with self._launcher.process(request, f"{job.job_id}-{job.fence}") as process:
                result = await self._attempt(claim, process, monitor)
                if not isinstance(result, Crashed | Failed):
                    process.drop_log()
        except OSError as error:
            result = Crashed(f"no build process could be started: {error}")
        # Only now: when a job is seen to end, nothing of its build runs any more.
        stages = monitor.stages.end()
        now = await self._report(claim, result)
        self._on_attempt(AttemptRecord(job, now, self._name, begun_s, time.monotonic(), stages))

    async def _attempt(self, claim: Claim, process: BuildProcess, monitor: _Monitor) -> Result:
        """Whatever comes first: the process's own end, or a reason to end it."""
        tasks = [
            asyncio.create_task(self._relay(claim, process, monitor)),
            asyncio.create_task(self._beat(claim)),
            asyncio.create_task(monitor.watch_memory(process)),
            asyncio.create_task(self._stopped()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # In the order above: an answer that is here counts, whatever else happened at the same moment.
            return next(task for task in tasks if task in done).result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _relay(self, claim: Claim, process: BuildProcess, monitor: _Monitor) -> Result:
        try:
            async for message in process.messages():
                if isinstance(message, Progress):
                    monitor.stages.enter(message.stage)
                    await self._record(claim, message, monitor.rss_bytes)
                elif isinstance(message, AskToPublish):
                    await self._insist(claim, lambda: self._queue.begin_publish(claim.token))
                    await process.allow_publication()
                else:
                    return message
        except Cancelled:
            return CancelledByCaller()
        except (JobStateConflict, JobNotFound, StoreUnavailable):
            return ClaimLost()
        except InternalError as error:
            return Crashed(error.message)
        how = await process.how_it_ended()
        stage, peak = monitor.stages.stage or "none", monitor.peak_bytes >> 20
        return Crashed(f"in stage {stage}, holding up to {peak} MiB, the build process {how}")

    async def _record(self, claim: Claim, message: Progress, rss_bytes: int) -> None:
        try:
            await self._queue.record_event(
                claim.token, stage=message.stage, fraction=message.fraction, message=message.message, rss_bytes=rss_bytes
            )
        except QuireError as error:
            # A lost claim is the heartbeat's to find out; a line of progress is not worth a build.
            _log.warning("progress not recorded", error=str(error))

    async def _beat(self, claim: Claim) -> Result:
        """Renew the lease until told to stop. A queue that does not answer for a whole lease has given the job away."""
        loop = asyncio.get_running_loop()
        every_s = min(MAX_BEAT_S, claim.lease_s / 3)
        renewed = loop.time()
        while True:
            await asyncio.sleep(every_s)
            try:
                answer = await self._queue.heartbeat(claim.token)
            except QuireError as error:
                _log.warning("lease not renewed", error=str(error))
                if loop.time() - renewed > claim.lease_s:
                    return ClaimLost()
                continue
            renewed = loop.time()
            if answer is HeartbeatAnswer.CANCEL:
                return CancelledByCaller()
            if answer is HeartbeatAnswer.OVERDUE:
                return Overdue()
            if answer is HeartbeatAnswer.LOST:
                return ClaimLost()

    async def _stopped(self) -> Result:
        await self._stopping.wait()
        return WorkerStopping()

    async def _report(self, claim: Claim, result: Result) -> Job | None:
        """The job after that; None where the queue did not take the result."""
        verdict = settle(result, claim.job.limits)
        _log.info("build ended", worker=self._name, verdict=repr(verdict))
        try:
            match verdict:
                case Outcome():
                    return await self._insist(claim, lambda: self._queue.finish(claim.token, verdict))
                case Retry(error=error):
                    return await self._insist(claim, lambda: self._queue.fail_attempt(claim.token, error))
                case GiveBack():
                    return await self._insist(claim, lambda: self._queue.release(claim.token))
        except QuireError as error:
            # The job is somebody else's by now, or will be when the lease lapses, or the queue has lost it; what was published
            # stays and is found.
            _log.warning("result not recorded", error=str(error))
        return None

    async def _insist(self, claim: Claim, call: Callable[[], Awaitable[_T]]) -> _T:
        """Repeat a call for as long as the lease lasts while the queue does not answer."""
        deadline = asyncio.get_running_loop().time() + claim.lease_s
        while True:
            try:
                return await call()
            except StoreUnavailable:
                if asyncio.get_running_loop().time() >= deadline:
                    raise
                await asyncio.sleep(QUEUE_RETRY_S)

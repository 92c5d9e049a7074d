"""`python -m compiler_service`: puts the compiler together and serves until SIGTERM or SIGINT.

Prints one JSON line with the address once it serves. On a signal: readiness off, running builds are ended and their jobs given
back to the queue, which a later start or another service takes up.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack

from compiler_service.config import CompilerSettings
from compiler_service.metrics import CompilerMetrics, QueueCollector
from compiler_service.service.explain import Explainer
from compiler_service.service.flight import builder_digest
from compiler_service.service.servicer import CompilerServicer
from compiler_service.worker.build_process import Launcher
from compiler_service.worker.record import AttemptRecord
from compiler_service.worker.worker import BuildPaths, Worker
from shared.artifacts.locate import open_store
from shared.errors import StoreUnavailable
from shared.jobs.locate import open_queue
from shared.jobs.queue import JobQueue, QueuePolicy, reclaim_forever
from shared.pb.quire.v1 import compiler_pb2_grpc
from shared.rpc.server import Server, stop_signals
from shared.service_main import run_service
from shared.telemetry.trace import Tracer, open_tracer, untraced

SERVICES = ("quire.v1.Compiler",)
BLOCKING_THREADS = 16
"""So many calls may wait for a store or a source's disk at the same time; others wait for one of them."""


class Compiler:
    """Queue, workers and the gRPC server in front of them. `async with` starts and ends all; `address` is where it serves."""

    def __init__(
        self, settings: CompilerSettings, queue: JobQueue, launcher: Launcher | None = None, tracer: Tracer = untraced
    ) -> None:
        self._settings, self._queue = settings, queue
        store = open_store(settings.store_location)
        launcher = launcher or Launcher(settings.build_directory)
        roots = tuple(root.expanduser().resolve() for root in settings.model_roots)
        paths = BuildPaths(settings.store_location, str(settings.digest_cache_file), tuple(map(str, roots)))
        owner = f"{socket.gethostname()}-{os.getpid()}"
        self._metrics, self._tracer = CompilerMetrics(), tracer
        self.metrics = settings.metrics_endpoint(self._metrics.registry)
        self.workers = [Worker(queue, f"{owner}-{slot}", launcher, paths, self._note) for slot in range(settings.build_slots)]
        self.server = Server(settings.server_options, SERVICES, settings.interceptors, self._metrics.note_call)
        explainer = Explainer(launcher, paths, settings.max_explains, settings.explain_timeout_s)
        self._blocking = ThreadPoolExecutor(BLOCKING_THREADS, thread_name_prefix="calls")
        servicer = CompilerServicer(queue, store, explainer, roots, builder_digest(), self._metrics, self._blocking)
        compiler_pb2_grpc.add_CompilerServicer_to_server(servicer, self.server.grpc)
        self.address = ""

    @property
    def addresses(self) -> dict[str, str | None]:
        """Where it serves, with the real ports."""
        return {"address": self.address, "metrics_address": None if self.metrics is None else self.metrics.address}

    def _note(self, record: AttemptRecord) -> None:
        self._metrics.note_attempt(record)
        self._tracer(record.span, record.claimed.traceparent)

    async def __aenter__(self) -> Compiler:
        if self.metrics is not None:
            self._metrics.registry.register(QueueCollector(self._metrics.prefix, self._queue, asyncio.get_running_loop()))
            self.metrics.start()
        self.address = await self.server.start()
        self._tasks = [asyncio.create_task(worker.run()) for worker in self.workers]
        self._tasks.append(asyncio.create_task(self._reclaim()))
        await self.server.set_ready(True)
        return self

    async def _reclaim(self) -> None:
        await reclaim_forever(self._queue, self._settings.reclaim_every_s, self._metrics.note_reclaimed)

    async def failure(self) -> None:
        """Raises when a worker or the house-keeping ends by a bug; a service without them must not look alive."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()

    async def __aexit__(self, *_: object) -> None:
        await self.server.begin_shutdown()
        for worker in self.workers:
            worker.stop()
        *builds, reclaiming = self._tasks
        reclaiming.cancel()
        await asyncio.gather(*builds, return_exceptions=True)
        await self.server.stop(self._settings.drain_s)
        self._blocking.shutdown(wait=False, cancel_futures=True)
        if self.metrics is not None:
            await asyncio.to_thread(self.metrics.stop)
        await self._queue.close()


async def serve(settings: CompilerSettings, policy: QueuePolicy | None = None, launcher: Launcher | None = None) -> None:
    try:
        settings.data_directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreUnavailable(f"QUIRE_DATA {settings.data_directory} cannot be made: {error}") from error
    queue = await open_queue(settings.queue_location, policy)
    async with AsyncExitStack() as running:
        tracer = running.enter_context(open_tracer("compiler", settings.otlp_endpoint))
        stopped = await running.enter_async_context(stop_signals())
        compiler = await running.enter_async_context(Compiler(settings, queue, launcher, tracer))
        sys.stdout.write(json.dumps(compiler.addresses) + "\n")
        sys.stdout.flush()
        ends = [asyncio.create_task(stopped.wait()), asyncio.create_task(compiler.failure())]
        done, pending = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        for task in done:
            task.result()


def main() -> None:
    run_service("compiler", CompilerSettings, serve)


if __name__ == "__main__":
    main()

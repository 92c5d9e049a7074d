"""`python -m runtime_service`: puts the runtime together and serves until SIGTERM or SIGINT.

Prints one JSON line with the address once it serves everything it starts with. On a signal: readiness off, nothing more admitted,
what runs may finish, the rest ends as retryable.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack

import structlog

# libgomp reads both when torch is first imported. Its threads must not spin through the other service's share of a core; but
# without the policy it hardly spins at all once a second thread (the one that loads engines) has had a team: half the decode rate.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ.setdefault("OMP_WAIT_POLICY", "active")

from runtime_service.config import RuntimeSettings
from runtime_service.engine.loader import EngineLoader
from runtime_service.loop import ServingLoop
from runtime_service.service.control import ControlServicer
from runtime_service.service.engines import Engines, Loader
from runtime_service.service.inference import InferenceServicer
from runtime_service.service.metrics import RuntimeCollector
from runtime_service.service.probes import report_health
from shared.artifacts.locate import open_store
from shared.artifacts.store import ArtifactStore
from shared.errors import QuireError
from shared.pb.quire.v1 import control_pb2_grpc, inference_pb2_grpc
from shared.rpc.server import Server, stop_signals
from shared.service_main import run_service
from shared.telemetry.metrics import ServiceMetrics
from shared.telemetry.trace import Tracer, open_tracer, untraced

SERVICES = ("quire.v1.Inference", "quire.v1.Control")
TOKENISING_THREADS = 2
LOADING_THREADS = 32
"""So many calls may load and unload engines, or wait for a load or unload of the same name, before others wait for one of them."""
LAST_WORDS_S = 5.0
"""After the drain streams get so long to hand over their last events."""


class Runtime:
    """The serving loop and the gRPC server in front of it. `async with` starts and ends both; `address` is where it serves."""

    def __init__(self, settings: RuntimeSettings, store: ArtifactStore, loader: Loader, tracer: Tracer = untraced) -> None:
        self._settings = settings
        self._tokenising = ThreadPoolExecutor(TOKENISING_THREADS, thread_name_prefix="tokenise")
        self._loading = ThreadPoolExecutor(LOADING_THREADS, thread_name_prefix="load")
        self.loop = ServingLoop(settings.max_waiting_requests)
        self.engines = Engines(store, loader, self.loop, settings, self._tokenising)
        metrics = ServiceMetrics("runtime")
        metrics.registry.register(RuntimeCollector(metrics.prefix, self.loop, self.engines.all))
        self.metrics = settings.metrics_endpoint(metrics.registry)
        self.server = Server(settings.server_options, SERVICES, settings.interceptors, metrics.note_call)
        inference = InferenceServicer(self.loop, self.engines, settings, tracer)
        control = ControlServicer(self.loop, self.engines, settings, self._loading)
        inference_pb2_grpc.add_InferenceServicer_to_server(inference, self.server.grpc)
        control_pb2_grpc.add_ControlServicer_to_server(control, self.server.grpc)
        self.address = ""

    async def __aenter__(self) -> Runtime:
        if self.metrics is not None:
            self.metrics.start()
        self.address = await self.server.start()
        self.loop.start()
        self._health = asyncio.create_task(report_health(self.server, self.loop, self.engines, self._settings.hang_after_s))
        self._starting = asyncio.create_task(asyncio.to_thread(self.engines.start))
        return self

    @property
    def addresses(self) -> dict[str, str | None]:
        """Where it serves, with the real ports."""
        return {"address": self.address, "metrics_address": None if self.metrics is None else self.metrics.address}

    async def started(self) -> None:
        """Returns once everything it starts with is loaded; raises what prevents that."""
        await asyncio.shield(self._starting)

    async def __aexit__(self, *_: object) -> None:
        """Drain and stop."""
        await self.server.begin_shutdown()
        self.engines.stop()
        self._health.cancel()
        with contextlib.suppress(QuireError):  # a loop that has died has nothing left to drain
            report = await asyncio.to_thread(self.loop.drain, self._settings.drain_s)
            structlog.get_logger(__name__).info("drained", finished=report.finished, aborted=report.aborted)
        await self.server.stop(LAST_WORDS_S)
        await asyncio.wait([self._starting])  # after the drain: what is being loaded may take long, and serves nobody any more
        await asyncio.to_thread(self.loop.stop)
        if self.metrics is not None:  # last: a drain is worth watching
            await asyncio.to_thread(self.metrics.stop)
        self._tokenising.shutdown()
        self._loading.shutdown(cancel_futures=True)


async def serve(settings: RuntimeSettings) -> None:
    store = open_store(settings.store_location, trusted_keys=settings.trusted_keys)
    async with AsyncExitStack() as running:
        tracer = running.enter_context(open_tracer("runtime", settings.otlp_endpoint))
        stopped = await running.enter_async_context(stop_signals())
        runtime = await running.enter_async_context(Runtime(settings, store, EngineLoader(), tracer))
        stopping, started = asyncio.create_task(stopped.wait()), asyncio.create_task(runtime.started())
        await asyncio.wait([stopping, started], return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            started.result()
            sys.stdout.write(json.dumps(runtime.addresses) + "\n")
            sys.stdout.flush()
        await stopping


def main() -> None:
    run_service("runtime", RuntimeSettings, serve)


if __name__ == "__main__":
    main()

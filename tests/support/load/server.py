"""`python -m tests.support.load.server WORD_SIZE`: the runtime with the tiny engine, as a process that can be weighed from outside.

Settings come from the environment as always; the metrics also tell how many asyncio tasks and threads there are.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from runtime_service.__main__ import Runtime
from runtime_service.config import RuntimeSettings
from shared.artifacts.local import LocalStore
from shared.rpc.server import stop_signals
from shared.telemetry.log import configure_logging
from tests.contract.runtime.conftest import Gate, TinyLoader, publish_tiny, spaced_tokenizer


def _is_socket(descriptor: Path) -> bool:
    try:
        return str(descriptor.readlink()).startswith("socket:")
    except FileNotFoundError:  # the listing's own
        return False


class Insides(Collector):
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("inside_tasks", "Asyncio tasks.", value=len(asyncio.all_tasks(self._loop)))
        yield GaugeMetricFamily("inside_threads", "Threads.", value=threading.active_count())
        yield GaugeMetricFamily(
            "inside_sockets", "Descriptors that are sockets.", value=sum(map(_is_socket, Path("/proc/self/fd").iterdir()))
        )


async def main(word_size: int) -> None:
    settings = RuntimeSettings()
    configure_logging("runtime", settings.log_level)
    store = LocalStore(settings.data_directory / "artifacts")
    publish_tiny(store, spaced_tokenizer(word_size))
    runtime = Runtime(settings, store, TinyLoader(Gate()))
    runtime.metrics._registry.register(Insides(asyncio.get_running_loop()))
    async with stop_signals() as stopped, runtime:
        print(json.dumps(runtime.addresses), flush=True)
        await stopped.wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))

"""`python -m runtime_service.replicas --devices 0,1,2,3`: one runtime a GPU behind one address, until SIGTERM or SIGINT.

Settings are the runtime's own (QUIRE_RUNTIME_*): address, TLS and tokens are the front's, everything else every replica's. Prints
one JSON line with the address once all replicas serve. A replica that ends takes the whole down: whoever supervises it starts
it again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from runtime_service.config import RuntimeSettings
from runtime_service.replicas.front import ControlFront, InferenceFront
from runtime_service.replicas.process import ReplicaProcess, environment_of
from runtime_service.replicas.replica import Replica
from shared.errors import FieldOutOfRange, QuireError, Unavailable
from shared.pb.quire.v1 import control_pb2_grpc, inference_pb2_grpc
from shared.rpc.server import Server, stop_signals
from shared.telemetry.log import configure_logging

SERVICES = ("quire.v1.Inference", "quire.v1.Control")
LAST_WORDS_S = 5.0


@asynccontextmanager
async def front(settings: RuntimeSettings, addresses: Sequence[str]) -> AsyncIterator[str]:
    """Serve the runtimes at `addresses` at the settings' address, which is yielded with its real port."""
    replicas = [Replica(address) for address in addresses]
    server = Server(settings.server_options, SERVICES, settings.interceptors)
    inference_pb2_grpc.add_InferenceServicer_to_server(InferenceFront(replicas), server.grpc)
    control_pb2_grpc.add_ControlServicer_to_server(ControlFront(replicas), server.grpc)
    await asyncio.gather(*(replica.refresh() for replica in replicas))
    reports = [asyncio.create_task(replica.keep_fresh()) for replica in replicas]
    address = await server.start()
    await server.set_ready(True)
    try:
        yield address
    finally:
        await server.stop(settings.drain_s + LAST_WORDS_S)
        for report in reports:
            report.cancel()
        await asyncio.gather(*(replica.close() for replica in replicas))


async def serve(settings: RuntimeSettings, devices: Sequence[str]) -> None:
    location = settings.store_location.place
    async with stop_signals() as stopped:
        environments = [
            environment_of(index, device, location, settings.data_directory, os.environ) for index, device in enumerate(devices)
        ]
        started = await asyncio.gather(*map(ReplicaProcess.start, environments), return_exceptions=True)
        running = [process for process in started if isinstance(process, ReplicaProcess)]
        try:
            for failure in started:
                if isinstance(failure, BaseException):
                    raise failure
            async with front(settings, [process.address for process in running]) as address:
                sys.stdout.write(json.dumps({"address": address, "replicas": [process.address for process in running]}) + "\n")
                sys.stdout.flush()
                await _until_one_ends(stopped, running)
        finally:
            await asyncio.gather(*(process.end(settings.drain_s + LAST_WORDS_S) for process in running))


async def _until_one_ends(stopped: asyncio.Event, running: Sequence[ReplicaProcess]) -> None:
    """Returns on a signal; Unavailable when a replica has ended by itself."""
    stop = asyncio.create_task(stopped.wait())
    ends = [asyncio.create_task(process.process.wait()) for process in running]
    await asyncio.wait([stop, *ends], return_when=asyncio.FIRST_COMPLETED)
    dead = [process for process in running if process.process.returncode is not None]
    for task in (stop, *ends):
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    if dead and not stopped.is_set():
        raise Unavailable(f"the replica at {dead[0].address} ended with exit code {dead[0].process.returncode}; its log is above")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", required=True, help="CUDA device indices, as 0,1; cpu for a replica without a GPU")
    devices = parser.parse_args().devices.split(",")
    try:
        settings = RuntimeSettings()
        configure_logging("front", settings.log_level)
    except (ValueError, FieldOutOfRange) as error:
        sys.exit(f"bad settings: {error}")
    try:
        asyncio.run(serve(settings, devices))
    except QuireError as error:
        sys.exit(error.message)


if __name__ == "__main__":
    main()

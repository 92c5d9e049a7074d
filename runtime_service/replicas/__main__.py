"""`python -m runtime_service.replicas --devices 0,1,2,3`: one runtime a GPU behind one address, until SIGTERM or SIGINT.

Settings are the runtime's own (QUIRE_RUNTIME_*): address, TLS and tokens are the front's, everything else every replica's. Prints
one JSON line with the address once all replicas serve. A replica that ends takes the whole down, one that stands still fails the
front's liveness: whoever supervises it starts it again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from runtime_service.config import RuntimeSettings
from runtime_service.replicas.front import ControlFront, InferenceFront
from runtime_service.replicas.process import environment_of
from runtime_service.replicas.replica import REPORT_PERIOD_S, Replica
from shared.pb.quire.v1 import control_pb2_grpc, inference_pb2_grpc
from shared.rpc.server import Server, stop_signals
from shared.service_main import run_service
from shared.service_process import ServiceProcess, all_ready, until_one_ends

SERVICES = ("quire.v1.Inference", "quire.v1.Control")
LAST_WORDS_S = 5.0
READY_TIMEOUT_S = 600.0
"""Until every replica serves everything it starts with."""


@asynccontextmanager
async def front(settings: RuntimeSettings, addresses: Sequence[str]) -> AsyncIterator[str]:
    """Serve the runtimes at `addresses` at the settings' address, which is yielded with its real port."""
    replicas = [Replica(address) for address in addresses]
    server = Server(settings.server_options, SERVICES, settings.interceptors)
    inference_pb2_grpc.add_InferenceServicer_to_server(InferenceFront(replicas), server.grpc)
    control_pb2_grpc.add_ControlServicer_to_server(ControlFront(replicas), server.grpc)
    await asyncio.gather(*(replica.refresh() for replica in replicas))
    address = await server.start()
    await server.set_ready(True)
    reports = [asyncio.create_task(replica.keep_fresh()) for replica in replicas]
    reports.append(asyncio.create_task(report_liveness(server, replicas)))
    try:
        yield address
    finally:
        await server.stop(settings.drain_s + LAST_WORDS_S)
        for report in reports:
            report.cancel()
        await asyncio.gather(*(replica.close() for replica in replicas))


async def report_liveness(server: Server, replicas: Sequence[Replica]) -> None:
    """Until cancelled: the front is live while every replica is."""
    reported = True
    while True:
        live = all(replica.is_live for replica in replicas)
        if live != reported:
            await server.set_live(live)
            reported = live
        await asyncio.sleep(REPORT_PERIOD_S)


async def serve(settings: RuntimeSettings, devices: Sequence[str]) -> None:
    location, replicas = settings.store_location.place, list[ServiceProcess]()
    async with stop_signals() as stopped:
        try:
            for index, device in enumerate(devices):
                environment = environment_of(index, device, location, settings.data_directory, os.environ)
                replicas.append(await ServiceProcess.start(f"replica on device {device}", "runtime_service", environment))
            if not await all_ready(stopped, replicas, READY_TIMEOUT_S):
                return
            addresses = [replica.address for replica in replicas]
            async with front(settings, addresses) as address:
                sys.stdout.write(json.dumps({"address": address, "replicas": addresses}) + "\n")
                sys.stdout.flush()
                await until_one_ends(stopped, replicas)
        finally:
            await asyncio.gather(*(replica.end(settings.drain_s + LAST_WORDS_S) for replica in replicas))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", required=True, help="CUDA device indices, as 0,1; cpu for a replica without a GPU")
    devices = parser.parse_args().devices.split(",")
    run_service("front", RuntimeSettings, lambda settings: serve(settings, devices))


if __name__ == "__main__":
    main()

"""What a replica inherits, and a front of two real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import grpc

from runtime_service.replicas.process import environment_of
from shared.pb.quire.v1 import control_pb2, control_pb2_grpc


def test_a_replica_has_a_device_and_a_roster_of_its_own_and_none_of_the_fronts_secrets() -> None:
    inherited = {
        "PATH": "/bin",
        "QUIRE_RUNTIME_TOKENS": "/secret",
        "QUIRE_RUNTIME_TLS_KEY": "/key",
        "QUIRE_RUNTIME_ADDRESS": "0.0.0.0:50062",
        "QUIRE_RUNTIME_MAX_RUN_S": "5",
        "TOKENS": "another program's",
    }
    environment = environment_of(1, "3", "s3://bucket/prefix", Path("/data"), inherited)
    assert environment == {
        "PATH": "/bin",
        "TOKENS": "another program's",
        "QUIRE_RUNTIME_MAX_RUN_S": "5",
        "QUIRE_RUNTIME_ADDRESS": "127.0.0.1:0",
        "QUIRE_RUNTIME_STORE": "s3://bucket/prefix",
        "QUIRE_DATA": "/data/replica-1",
        "CUDA_VISIBLE_DEVICES": "3",
    }
    assert environment_of(0, "cpu", "/store", Path("/data"), {})["CUDA_VISIBLE_DEVICES"] == ""


async def test_two_processes_serve_behind_one_address_until_told_to_stop(tmp_path: Path) -> None:
    environment = os.environ | {"QUIRE_DATA": str(tmp_path), "QUIRE_RUNTIME_ADDRESS": "127.0.0.1:0", "QUIRE_RUNTIME_DRAIN_S": "0"}
    command = [sys.executable, "-m", "runtime_service.replicas", "--devices", "cpu,cpu"]
    process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    ready = json.loads(await process.stdout.readline())
    assert len(set(ready["replicas"])) == 2
    async with grpc.aio.insecure_channel(ready["address"]) as channel:
        info = await control_pb2_grpc.ControlStub(channel).GetServerInfo(control_pb2.GetServerInfoRequest())
    assert info.max_waiting_requests == 2 * 256
    process.send_signal(signal.SIGTERM)
    assert await process.wait() == 0

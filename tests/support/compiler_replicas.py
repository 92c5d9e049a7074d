"""Compiler services as real processes on one queue and one store, with builds that only pretend; clients that outlive them.

python -m tests.support.compiler_replicas        one service; settings from the environment, as in the real one
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc

from compiler_service.__main__ import serve
from compiler_service.config import CompilerSettings
from compiler_service.worker.build_process import Launcher
from compiler_service.worker.process_tree import process_tree, read_stat
from shared.pb.quire.v1 import common_pb2, compiler_pb2_grpc
from shared.pb.quire.v1 import compiler_pb2 as pb
from shared.telemetry.log import configure_logging
from tests.support.queue_process import FAST

FAKE = (sys.executable, "-m", "tests.support.fake_build")
MAX_ATTEMPTS = 20
_RECONNECT = [(f"grpc.{which}_reconnect_backoff_ms", ms) for which, ms in (("initial", 50), ("min", 50), ("max", 200))]


@dataclass
class Replica:
    """One service process; started anew it is reached under the same address."""

    name: str
    home: Path
    environment: dict[str, str]
    lease_s: float
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.address = f"unix:{self.home / self.name}.sock"
        self.start()

    def start(self) -> None:
        self._ready = self.home / f"{self.name}.ready"
        own = {"QUIRE_DATA": str(self.home / self.name), "QUIRE_COMPILER_ADDRESS": self.address}
        with self._ready.open("wb") as ready, (self.home / f"{self.name}.log").open("ab") as log:
            command = [sys.executable, "-m", "tests.support.compiler_replicas", str(self.lease_s)]
            self.process = subprocess.Popen(command, env=os.environ | self.environment | own, stdout=ready, stderr=log)

    @property
    def is_up(self) -> bool:
        """Whether this process has said that it serves."""
        return bool(self._ready.read_bytes())

    def log_tail(self) -> str:
        return (self.home / f"{self.name}.log").read_text()[-2000:]

    def keep_up(self) -> None:
        """Start it again if it could not start because its queue was away; AssertionError if it died while it served."""
        if self.process.poll() is not None:
            assert not self.is_up, f"{self.name} died by itself: {self.log_tail()}"
            self.start()

    def kill(self) -> None:
        """kill -9, and a new one in its place."""
        self.process.kill()
        self.process.wait()
        self.start()

    def builds(self) -> list[int]:
        """Process ids of the builds that run now."""
        service = read_stat(self.process.pid)
        return [stat.pid for stat in process_tree(service) if stat.pid != service.pid] if service else []

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)


@contextmanager
def replicas(count: int, models: Path, environment: dict[str, str], *, lease_s: float = 30.0) -> Iterator[list[Replica]]:
    """`count` services over `models`; SIGTERM at the end must find each alive and end it in order."""
    home = Path(tempfile.mkdtemp(prefix="quire-compilers-"))  # short: socket paths are limited to 107 bytes
    common = {"QUIRE_COMPILER_MODEL_ROOTS": str(models), "QUIRE_COMPILER_DRAIN_S": "0", "QUIRE_COMPILER_RECLAIM_EVERY_S": "0.2"}
    running = [Replica(f"compiler-{number}", home, common | environment, lease_s) for number in range(count)]
    try:
        yield running
        assert [replica.stop() for replica in running] == [0] * count, running[0].log_tail()
    finally:
        for replica in running:
            replica.process.kill()
            replica.process.wait()
        shutil.rmtree(home, ignore_errors=True)  # a build that dies with its service may still write


def channel_to(replica: Replica) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(replica.address, options=_RECONNECT)


def write_source(models: Path, name: str, **plan: Any) -> None:
    """A directory that looks like a checkpoint from outside; a fake build of it does what `plan` says."""
    (models / name).mkdir(parents=True)
    (models / name / "model.safetensors").write_bytes(b"weights")
    for file, content in {"config.json": {}, "tokenizer.json": {}, "plan.json": plan}.items():
        (models / name / file).write_text(json.dumps(content))


def spec_of(source: str, max_len: int) -> pb.CompileSpec:
    def profile(name: str, batch: int, length: int) -> common_pb2.OptimizationProfile:
        sizes = (common_pb2.SizeRange(min=1, max=batch), common_pb2.SizeRange(min=1, max=length))
        return common_pb2.OptimizationProfile(name=name, batch=sizes[0], query_len=sizes[1])

    return pb.CompileSpec(
        source=source,
        backend=common_pb2.BACKEND_INDUCTOR,
        layout=common_pb2.KV_LAYOUT_PAGED,
        dtype=common_pb2.ELEMENT_TYPE_FLOAT32,
        max_len=max_len,
        profiles=[profile("decode", 8, 1), profile("prefill", 1, 128)],
    )


def create_request(request_id: str, source: str, max_len: int) -> pb.CreateCompileJobRequest:
    return pb.CreateCompileJobRequest(
        request_id=request_id, spec=spec_of(source, max_len), limits=pb.JobLimits(max_attempts=MAX_ATTEMPTS)
    )


def stub_of(channel: grpc.aio.Channel) -> compiler_pb2_grpc.CompilerStub:
    return compiler_pb2_grpc.CompilerStub(channel)


def main(lease_s: str) -> None:
    settings = CompilerSettings()
    configure_logging("compiler", settings.log_level)
    asyncio.run(serve(settings, replace(FAST, lease_s=float(lease_s)), Launcher(settings.build_directory, FAKE)))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A runtime as a child process, on one device, on a loopback address of its own."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from shared.errors import Unavailable

READY_TIMEOUT_S = 600.0
"""Until it serves everything it starts with."""
_FRONTS_OWN = (
    "TLS_CERTIFICATE",
    "TLS_KEY",
    "TLS_CLIENT_CA",
    "TOKENS",
    "ALLOW_PLAINTEXT",
    "HEALTH_ADDRESS",
    "METRICS_ADDRESS",
    "REFLECTION",
)
"""Settings that are the front's: a replica is reached through it alone."""


def environment_of(index: int, device: str, store: str, data: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """Of replica `index`: what the front inherited, on `device` (a CUDA device index, or `cpu`), with a roster of its own and the
    common store."""
    fronts = {f"QUIRE_RUNTIME_{name}" for name in _FRONTS_OWN}
    environment = {name: value for name, value in inherited.items() if name not in fronts}
    environment |= {
        "QUIRE_RUNTIME_ADDRESS": "127.0.0.1:0",
        "QUIRE_RUNTIME_STORE": store,
        "QUIRE_DATA": str(data / f"replica-{index}"),
        "CUDA_VISIBLE_DEVICES": "" if device == "cpu" else device,
    }
    return environment


class ReplicaProcess:
    """Started by `start`; `end` drains it."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self.process = process
        self.address = address

    @classmethod
    async def start(cls, environment: Mapping[str, str]) -> ReplicaProcess:
        """Unavailable when it ends, or says nothing, before it serves."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "runtime_service",
            env=dict(environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        try:
            line = await asyncio.wait_for(process.stdout.readline(), READY_TIMEOUT_S)
        except TimeoutError:
            process.kill()
            raise Unavailable(f"a replica was not ready within {READY_TIMEOUT_S:.0f} s; its log is above") from None
        if not line:
            raise Unavailable(f"a replica ended with exit code {await process.wait()} before it was ready; its log is above")
        return cls(process, str(json.loads(line)["address"]))

    async def end(self, grace_s: float) -> None:
        """SIGTERM, `grace_s` to drain, then SIGKILL."""
        if self.process.returncode is None:
            self.process.terminate()
            try:
                await asyncio.wait_for(self.process.wait(), grace_s)
            except TimeoutError:
                self.process.kill()
                await self.process.wait()

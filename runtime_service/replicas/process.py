"""What a replica's process is told: one device, a loopback address and a directory of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

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

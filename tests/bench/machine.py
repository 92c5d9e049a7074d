"""What a result was measured on, written into every JSON file."""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def describe() -> dict[str, Any]:
    """Card or CPU, versions and date."""
    name = next(
        (line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), ""
    )
    facts: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": name,
        "cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for package in ("transformers", "triton"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = None
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def copy_bandwidth(device: torch.device, size: int = 4 << 30, repeats: int = 7) -> float:
    """Bytes a second, read plus written, of the fastest of `repeats` device copies: the roof of everything that moves bytes.

    Timed eagerly: a copy inside a CUDA graph may run on a copy engine, at two thirds of the rate.
    """
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return 2 * size / min(times)


@contextmanager
def gpu_alone() -> Iterator[None]:
    """One measurement at a time on the GPU that this process sees, whichever process makes it."""
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    with (Path(tempfile.gettempdir()) / f"quire-gpu-{device}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_json(path: Path, results: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": describe(), "results": results}, indent=1, sort_keys=True) + "\n")

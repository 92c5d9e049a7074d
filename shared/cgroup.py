"""The memory of the container this process runs in, as its control group tells it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class ContainerMemory:
    """`left_bytes` counts cached file pages, of weights just verified for one: they are given back when memory is wanted."""

    limit_bytes: int
    left_bytes: int


def container_memory(cgroup: Path = CGROUP) -> ContainerMemory | None:
    """None where nothing limits it."""
    limit = cgroup / "memory.max"
    if not limit.exists() or (text := limit.read_text().strip()) == "max":
        return None
    usage = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    cached = int(usage["active_file"]) + int(usage["inactive_file"])
    left = int(text) - int((cgroup / "memory.current").read_text()) + cached
    return ContainerMemory(int(text), max(0, left))

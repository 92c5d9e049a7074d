"""How large a KV pool is when nobody says."""

from __future__ import annotations

from pathlib import Path

import torch

from shared.cgroup import CGROUP, container_memory
from shared.errors import MemoryExhausted
from shared.kv_spec import KVCacheSpec

_MEMINFO = Path("/proc/meminfo")


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = CGROUP) -> int:
    """Memory this process may still take: the host's, or less where a container limits it."""
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    host = int(fields["MemAvailable"].split()[0]) * 1024
    container = container_memory(cgroup)
    return host if container is None else min(host, container.left_bytes)


def available_device_bytes(margin_bytes: int) -> int:
    """Memory of the GPU that pools may still take: what is free but for `margin_bytes`, which steps and their graphs work in.

    What torch holds in reserve and does not use counts as free.
    """
    torch.cuda.empty_cache()
    free, _total = torch.cuda.mem_get_info()
    return max(0, free - margin_bytes)


def pages_within(num_bytes: int, spec: KVCacheSpec) -> int:
    """Pages, the dump page included, that fit into `num_bytes`; MemoryExhausted if that leaves none to serve with."""
    pages = num_bytes // spec.page_bytes
    if pages < 2:
        raise MemoryExhausted(
            f"a KV pool needs 2 pages of {spec.page_bytes} bytes at least (one is the dump page); got room for {num_bytes} bytes"
        )
    return pages


def check_room(num_pages: int, spec: KVCacheSpec, room_bytes: int) -> None:
    """MemoryExhausted for a pool larger than `room_bytes`: on a host that overcommits, filling it would end the process."""
    if num_pages * spec.page_bytes > room_bytes:
        raise MemoryExhausted(
            f"a KV pool of {num_pages} pages takes {num_pages * spec.page_bytes} bytes; this host has {room_bytes} left. "
            "Use fewer pages or unload an engine"
        )


def default_pages(spec: KVCacheSpec, max_batch: int, share_bytes: int) -> int:
    """As many pages as `max_batch` sequences of the greatest length fill, and the dump page; fewer if the share is smaller."""
    return min(1 + max_batch * spec.max_pages, pages_within(share_bytes, spec))

"""How large a KV pool is when nobody says."""

from __future__ import annotations

from pathlib import Path

import torch

from shared.errors import MemoryExhausted
from shared.kv_spec import KVCacheSpec

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Memory this process may still take: the host's, or less where a control group (a container) limits it.

    Cached file pages, of weights that were just verified for one, are given back when memory is wanted: they count as free.
    """
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    host = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = cgroup / "memory.max", cgroup / "memory.current"
    if not limit.exists() or (text := limit.read_text().strip()) == "max":
        return host
    usage = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    cached = int(usage["active_file"]) + int(usage["inactive_file"])
    return max(0, min(host, int(text) - int(used.read_text()) + cached))


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

"""A build and everything it started, as /proc shows it: how much memory it holds, and how to end all of it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_RECHECK_S = 0.01
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class ProcessStat:
    pid: int
    state: str
    parent: int
    session: int
    rss_bytes: int

    @property
    def is_dead(self) -> bool:
        """Ended and only waiting to be collected by its parent."""
        return self.state in "ZX"


def parse_stat(text: str) -> ProcessStat:
    """Fields of /proc/PID/stat. The command's name stands in parentheses and may hold anything, parentheses included."""
    pid = int(text.split(" ", 1)[0])
    fields = text.rpartition(")")[2].split()
    return ProcessStat(pid, fields[0], int(fields[1]), int(fields[3]), int(fields[21]) * _PAGE_BYTES)


def process_tree(leader: int) -> list[ProcessStat]:
    """`leader`, its descendants, and what else is in the session it leads (a child's child whose parent is gone)."""
    everything = {stat.pid: stat for stat in _all_processes()}

    def belongs(stat: ProcessStat) -> bool:
        while stat.pid != leader and stat.session != leader:
            if stat.parent not in everything:
                return False
            stat = everything[stat.parent]
        return True

    return [stat for stat in everything.values() if belongs(stat)]


def tree_rss_bytes(leader: int) -> int:
    """Resident bytes of all of it; pages that several of its processes share count in each."""
    return sum(stat.rss_bytes for stat in process_tree(leader))


def kill_tree(leader: int) -> None:
    """SIGKILL all of it and return once none is left that could start another. Blocks; harmless where it is gone already."""
    while members := [stat.pid for stat in process_tree(leader) if not stat.is_dead]:
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_RECHECK_S)


def _all_processes() -> Iterator[ProcessStat]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                yield parse_stat((entry / "stat").read_text())
            except (FileNotFoundError, ProcessLookupError):
                continue

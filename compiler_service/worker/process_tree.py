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
    started: int
    """Clock ticks after boot: with the number it names one process for good, numbers alone are given again."""
    rss_bytes: int

    @property
    def is_dead(self) -> bool:
        """Ended and only waiting to be collected by its parent."""
        return self.state in "ZX"


def parse_stat(text: str) -> ProcessStat:
    """Fields of /proc/PID/stat. The command's name stands in parentheses and may hold anything, parentheses included."""
    pid = int(text.split(" ", 1)[0])
    fields = text.rpartition(")")[2].split()
    return ProcessStat(pid, fields[0], int(fields[1]), int(fields[3]), int(fields[19]), int(fields[21]) * _PAGE_BYTES)


def read_stat(pid: int) -> ProcessStat | None:
    """None where there is no such process."""
    try:
        return parse_stat(Path(f"/proc/{pid}/stat").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return None


def process_tree(leader: ProcessStat) -> list[ProcessStat]:
    """`leader` (a process when it was started), its descendants, and what else is in the session it leads (a child's child whose
    parent is gone). None where another process has its number by now: that is given again when all of these are gone.
    """
    everything = {stat.pid: stat for stat in _all_processes()}
    if (now := everything.get(leader.pid)) is not None and now.started != leader.started:
        return []

    def belongs(stat: ProcessStat) -> bool:
        while stat.pid != leader.pid and stat.session != leader.pid:
            if stat.parent not in everything:
                return False
            stat = everything[stat.parent]
        return True

    return [stat for stat in everything.values() if belongs(stat)]


def tree_rss_bytes(leader: ProcessStat) -> int:
    """Resident bytes of all of it; pages that several of its processes share count in each."""
    return sum(stat.rss_bytes for stat in process_tree(leader))


def kill_tree(leader: ProcessStat) -> None:
    """SIGKILL all of it and return once none is left that could start another. Blocks; harmless where it is gone already.

    Whoever was seen once is waited for: a child in a session of its own belongs to nobody as soon as its parent is gone.
    """
    seen: set[ProcessStat] = set()
    while seen := {stat for stat in {*seen, *process_tree(leader)} if _runs(stat)}:
        for stat in seen:
            _kill(stat)
        time.sleep(_RECHECK_S)


def _runs(process: ProcessStat) -> bool:
    now = read_stat(process.pid)
    return now is not None and now.started == process.started and not now.is_dead


def _kill(process: ProcessStat) -> None:
    """Kill it and never another that has got its number since it was seen: the descriptor stays with the one it was opened for."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(process.pid)
        try:
            if (now := read_stat(process.pid)) is not None and now.started == process.started:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)


def _all_processes() -> Iterator[ProcessStat]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (stat := read_stat(int(entry.name))) is not None:
            yield stat

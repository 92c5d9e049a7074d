"""What belongs to a build is found and ended, and nothing else."""

import dataclasses
import os
import signal
import subprocess
import sys
import time

import pytest

from compiler_service.worker import process_tree as process_tree_module
from compiler_service.worker.process_tree import kill_tree, parse_stat, process_tree, read_stat, tree_rss_bytes

SLEEP = "import time; time.sleep(600)"
PARENT = f"""
import subprocess, sys, time
a = subprocess.Popen([sys.executable, "-c", {SLEEP!r}])
b = subprocess.Popen([sys.executable, "-c", {SLEEP!r}], start_new_session=True)
print(a.pid, b.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def family():
    """A leader with a child in its session and one in a session of its own, and a stranger."""
    leader = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, start_new_session=True)
    stranger = subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=True)
    children = [int(pid) for pid in leader.stdout.readline().split()]
    yield leader, children, stranger
    for pid in (leader.pid, stranger.pid, *children):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    leader.wait()
    stranger.wait()


def pids(leader):
    return {stat.pid for stat in process_tree(leader) if not stat.is_dead}


def stats(leader, children, stranger):
    return read_stat(leader.pid), [read_stat(child) for child in children], read_stat(stranger.pid)


@pytest.mark.parametrize("name", ["python", "a b", ") S 1 (", "x) R 7 8"])
def test_a_command_name_may_hold_anything(name):
    fields = ["S", "10", "20", "30", *["0"] * 15, "77", "0", "5", "0"]
    stat = parse_stat(f"42 ({name}) {' '.join(fields)}")
    assert (stat.pid, stat.state, stat.parent, stat.session, stat.started) == (42, "S", 10, 30, 77)
    assert stat.rss_bytes == 5 * os.sysconf("SC_PAGE_SIZE")


def test_descendants_and_the_session_belong(family):
    leader, children, stranger = stats(*family)
    assert pids(leader) == {leader.pid, *(child.pid for child in children)}
    assert pids(stranger) == {stranger.pid}


def test_memory_is_that_of_all(family):
    leader, children, _ = stats(*family)
    assert tree_rss_bytes(leader) > 2 * min(tree_rss_bytes(child) for child in children) > 0


def test_a_child_of_the_session_whose_parent_is_gone_still_belongs(family):
    leader, children, _ = stats(*family)
    family[0].kill()
    family[0].wait()
    assert pids(leader) == {children[0].pid}


def test_all_of_it_is_killed_and_nothing_else(family):
    leader, children, _ = stats(*family)
    kill_tree(leader)
    assert family[0].wait() == -signal.SIGKILL
    assert pids(leader) == set()
    deadline = time.monotonic() + 30
    while any(pids(child) for child in children) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(pids(child) for child in children)
    assert family[2].poll() is None


def test_killing_what_is_gone_is_harmless(family):
    leader, _, _ = stats(*family)
    kill_tree(leader)
    kill_tree(leader)


def test_a_process_that_got_the_number_of_a_leader_that_is_gone_is_left_alone(family):
    _, _, stranger = stats(*family)
    gone = dataclasses.replace(stranger, started=stranger.started - 1)
    kill_tree(gone)
    assert tree_rss_bytes(gone) == 0
    assert family[2].poll() is None


def test_a_process_that_got_the_number_of_a_member_since_it_was_seen_is_left_alone(family, monkeypatch):
    leader, _, stranger = stats(*family)
    stale = dataclasses.replace(stranger, started=stranger.started - 1)
    seen = iter([[stale], []])
    monkeypatch.setattr(process_tree_module, "process_tree", lambda _: next(seen))
    kill_tree(leader)
    time.sleep(0.05)
    assert family[2].poll() is None

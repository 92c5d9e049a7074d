"""What belongs to a build is found and ended, and nothing else."""

import os
import signal
import subprocess
import sys
import time

import pytest

from compiler_service.worker.process_tree import kill_tree, parse_stat, process_tree, tree_rss_bytes

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


@pytest.mark.parametrize("name", ["python", "a b", ") S 1 (", "x) R 7 8"])
def test_a_command_name_may_hold_anything(name):
    fields = ["S", "10", "20", "30", *["0"] * 17, "5", "0"]
    stat = parse_stat(f"42 ({name}) {' '.join(fields)}")
    assert (stat.pid, stat.state, stat.parent, stat.session) == (42, "S", 10, 30)
    assert stat.rss_bytes == 5 * os.sysconf("SC_PAGE_SIZE")


def test_descendants_and_the_session_belong(family):
    leader, children, stranger = family
    assert pids(leader.pid) == {leader.pid, *children}
    assert pids(stranger.pid) == {stranger.pid}


def test_memory_is_that_of_all(family):
    leader, children, _ = family
    assert tree_rss_bytes(leader.pid) > 2 * min(tree_rss_bytes(child) for child in children) > 0


def test_a_child_of_the_session_whose_parent_is_gone_still_belongs(family):
    leader, children, _ = family
    leader.kill()
    leader.wait()
    assert pids(leader.pid) == {children[0]}


def test_all_of_it_is_killed_and_nothing_else(family):
    leader, children, stranger = family
    kill_tree(leader.pid)
    assert leader.wait() == -signal.SIGKILL
    assert pids(leader.pid) == set()
    deadline = time.monotonic() + 30
    while any(pids(child) for child in children) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(pids(child) for child in children)
    assert stranger.poll() is None


def test_killing_what_is_gone_is_harmless(family):
    leader, _, _ = family
    kill_tree(leader.pid)
    kill_tree(leader.pid)

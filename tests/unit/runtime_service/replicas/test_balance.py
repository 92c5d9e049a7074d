"""Requests go where the fewest pages are used, and a burst is spread before anybody has reported it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runtime_service.replicas.balance import ReplicaLoad, least_loaded


def test_the_least_used_pages_win_whatever_the_requests() -> None:
    few_large, many_small = ReplicaLoad(100, 20, 2), ReplicaLoad(100, 70, 30)
    assert least_loaded([few_large, many_small], [2, 30]) == 1


def test_pages_are_shares_so_a_small_replica_gets_its_share() -> None:
    assert least_loaded([ReplicaLoad(1000, 500, 9), ReplicaLoad(100, 40, 9)], [9, 9]) == 0
    assert least_loaded([ReplicaLoad(1000, 500, 9), ReplicaLoad(100, 60, 9)], [9, 9]) == 1


def test_who_does_not_serve_the_engine_gets_nothing() -> None:
    assert least_loaded([None, ReplicaLoad(10, 0, 5), None], [0, 99, 0]) == 1
    assert least_loaded([None, None], [0, 0]) is None
    assert least_loaded([], []) is None


def test_what_is_under_way_counts_as_much_as_what_ran() -> None:
    """Two runs of ten pages each: a third request is worth ten pages, not one."""
    loaded, empty = ReplicaLoad(100, 80, 2), ReplicaLoad(100, 100, 0)
    assert least_loaded([loaded, empty], [3, 29]) == 1
    assert least_loaded([loaded, empty], [3, 31]) == 0


def test_who_has_nothing_under_way_wins_whatever_it_reported() -> None:
    """A report is as old as its period: what has ended since holds no page."""
    assert least_loaded([ReplicaLoad(100, 99, 1), ReplicaLoad(100, 10, 9)], [1, 0]) == 1


@given(
    replicas=st.lists(st.tuples(st.integers(1, 500), st.integers(0, 500), st.integers(0, 50)), min_size=1, max_size=8),
    burst=st.integers(1, 60),
)
def test_a_burst_over_equal_replicas_is_spread_evenly(replicas: list[tuple[int, int, int]], burst: int) -> None:
    total, used, running = replicas[0]
    loads = [ReplicaLoad(total, total - min(used, total), running)] * len(replicas)
    under_way = [running] * len(replicas)
    for _ in range(burst):
        chosen = least_loaded(loads, under_way)
        assert chosen is not None
        under_way[chosen] += 1
    assert max(under_way) - min(under_way) <= 1

"""A lease beats until it is closed, whatever the medium does meanwhile."""

from __future__ import annotations

import threading

import pytest

from shared.artifacts.lease import Lease
from shared.errors import StoreUnavailable


def test_it_renews_again_and_again_and_stops_when_closed() -> None:
    beats = threading.Semaphore(0)
    released: list[int] = []
    lease = Lease(beats.release, lambda: released.append(1), ttl_s=0.003)
    for _ in range(3):
        assert beats.acquire(timeout=30)
    lease.close()
    lease.close()
    assert released == [1]
    while beats.acquire(blocking=False):
        pass
    assert not beats.acquire(timeout=0.05)


@pytest.mark.parametrize("error", [OSError("gone"), StoreUnavailable("gone")])
def test_a_medium_that_fails_for_a_while_is_tried_again(error: Exception) -> None:
    beats = threading.Semaphore(0)

    def renew() -> None:
        beats.release()
        raise error

    lease = Lease(renew, renew, ttl_s=0.003)
    for _ in range(3):
        assert beats.acquire(timeout=30)
    lease.close()

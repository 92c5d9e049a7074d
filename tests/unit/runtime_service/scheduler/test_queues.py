"""The order of waiting."""

from __future__ import annotations

import pytest

from runtime_service.core.sequence import Sequence
from runtime_service.scheduler.queues import WaitingQueue
from tests.support.serving import request


def waiting(arrival: int, priority: int = 0) -> Sequence:
    return Sequence(request([1], 1, priority=priority), 0, arrival)


def test_priority_then_arrival_decides_whatever_the_order_of_adding() -> None:
    first, second, urgent, patient = waiting(0), waiting(1), waiting(2, priority=1), waiting(3, priority=-1)
    queue = WaitingQueue()
    for sequence in (patient, second, urgent, first):
        queue.add(sequence)
    assert list(queue) == [urgent, first, second, patient]
    assert queue.head is urgent


def test_any_place_can_be_left() -> None:
    sequences = [waiting(n) for n in range(5)]
    queue = WaitingQueue()
    for sequence in sequences:
        queue.add(sequence)
    for index in (2, 4, 0):
        queue.discard(sequences[index])
    assert list(queue) == [sequences[1], sequences[3]]


@pytest.mark.parametrize("arrival", [0, 1, 9])
def test_discarding_what_does_not_wait_takes_nobody_else(arrival: int) -> None:
    queue = WaitingQueue()
    queue.add(waiting(1))
    queue.discard(waiting(arrival))
    assert len(queue) == 1


def test_an_empty_queue_has_no_head() -> None:
    assert WaitingQueue().head is None

"""Page ownership: what is handed out, what comes back, what is refused with nothing changed."""

from __future__ import annotations

import pytest

from runtime_service.kv.allocator import DUMP_PAGE, PageAllocator
from shared.errors import InternalError
from shared.ids import PageId
from tests.support.fences import Gate


def pages(*ids: int) -> list[PageId]:
    return [PageId(i) for i in ids]


def test_every_page_but_the_dump_page_is_handed_out_once() -> None:
    allocator = PageAllocator(5)
    assert (allocator.capacity, allocator.num_free) == (4, 4)
    taken = allocator.try_allocate(4)
    assert taken is not None
    assert sorted(taken) == [1, 2, 3, 4]
    assert DUMP_PAGE not in taken
    assert (allocator.num_free, allocator.num_used) == (0, 4)


def test_exhaustion_is_a_return_value_and_changes_nothing() -> None:
    allocator = PageAllocator(4)
    assert allocator.try_allocate(4) is None
    assert allocator.num_free == 3
    assert allocator.try_allocate(0) == []


def test_a_page_released_twice_in_one_call_is_refused() -> None:
    """BR-031: release [7, 7] must not put page 7 on the free list twice."""
    allocator = PageAllocator(9)
    taken = allocator.try_allocate(8)
    assert taken is not None
    with pytest.raises(ValueError, match=r"\[7\] are listed twice"):
        allocator.release(pages(7, 7))
    assert allocator.num_free == 0
    assert allocator.release(pages(7)) == 1
    assert allocator.try_allocate(2) is None
    assert allocator.try_allocate(1) == [7]


@pytest.mark.parametrize(("released", "match"), [((2, 0), "none of 1..3"), ((2, 4), "none of 1..3"), ((1, 3), "free already")])
def test_a_release_that_is_wrong_in_one_page_releases_none(released: tuple[int, ...], match: str) -> None:
    allocator = PageAllocator(4)
    assert allocator.try_allocate(2) == [1, 2]
    with pytest.raises(ValueError, match=match):
        allocator.release(pages(*released))
    assert allocator.num_used == 2
    allocator.check_integrity()


def test_a_shared_page_is_free_after_its_last_owner() -> None:
    allocator = PageAllocator(4)
    owned = allocator.try_allocate(2)
    assert owned is not None
    assert allocator.share(owned[:1]) == owned[:1]
    assert (allocator.num_used, allocator.num_shared) == (2, 1)
    assert allocator.is_shared(owned[0])
    assert not allocator.is_shared(owned[1])
    assert allocator.release(owned) == 1
    allocator.check_integrity()
    assert allocator.release(owned[:1]) == 1
    assert allocator.num_free == 3


def test_a_fork_is_all_or_nothing() -> None:
    """BR-038: sharing a list with one bad page leaves every count as it was."""
    allocator = PageAllocator(6)
    owned = allocator.try_allocate(3)
    assert owned is not None
    with pytest.raises(ValueError, match="free already"):
        allocator.share([*owned, PageId(5)])
    assert allocator.num_shared == 0
    assert allocator.try_allocate(3) is None
    assert allocator.num_free == 2


def test_integrity_names_lost_pages_and_pages_that_are_both() -> None:
    """BR-033."""
    allocator = PageAllocator(4)
    allocator.check_integrity()
    allocator._blank.remove(PageId(2))
    with pytest.raises(InternalError, match=r"lost: \[2\]"):
        allocator.check_integrity()
    allocator._blank.append(PageId(2))
    allocator._references[2] = 1
    with pytest.raises(InternalError, match=r"both free and used: \[2\]"):
        allocator.check_integrity()


def test_integrity_counts_the_shared_pages() -> None:
    allocator = PageAllocator(4)
    owned = allocator.try_allocate(2)
    assert owned is not None
    allocator.share(owned)
    allocator.check_integrity()
    allocator._num_shared -= 1
    with pytest.raises(InternalError, match="2 pages are shared, 1 are counted"):
        allocator.check_integrity()


def test_a_pool_without_a_page_to_own_is_refused() -> None:
    with pytest.raises(ValueError, match="num_pages 1"):
        PageAllocator(1)


def test_what_is_released_behind_a_fence_is_free_and_waited_for_only_when_it_is_needed() -> None:
    """BR-047: pages of a sequence that ended return at once, and are written by others only behind what was launched before."""
    allocator = PageAllocator(7)
    taken, gate = allocator.try_allocate(4) or [], Gate()
    allocator.hold_back(gate)
    assert allocator.release(taken[:3]) == 3
    assert (allocator.num_free, allocator.num_used) == (5, 1)
    allocator.check_integrity()
    assert not set(allocator.try_allocate(2) or []) & set(taken)
    assert gate.waits == 0
    assert allocator.try_allocate(4) is None
    assert gate.waits == 0
    assert set(allocator.try_allocate(3) or []) == set(taken[:3])
    assert (gate.waits, allocator.num_free) == (1, 0)
    allocator.check_integrity()


def test_pages_come_back_in_the_order_of_their_fences() -> None:
    allocator = PageAllocator(5)
    taken, first, second = allocator.try_allocate(4) or [], Gate(), Gate()
    allocator.hold_back(first)
    allocator.release(taken[:1])
    allocator.hold_back(second)
    allocator.release(taken[1:2])
    assert allocator.try_allocate(1) == taken[:1]
    assert (first.waits, second.waits) == (1, 0)
    second.open = True
    allocator.release(taken[2:3])
    assert sorted(allocator.try_allocate(2) or []) == sorted(taken[1:3])
    assert second.waits == 0


def test_a_shared_page_is_held_back_by_the_last_of_its_owners() -> None:
    allocator = PageAllocator(3)
    taken, gate = allocator.try_allocate(2) or [], Gate()
    allocator.share(taken)
    allocator.release(taken)
    allocator.hold_back(gate)
    assert (allocator.release(taken), allocator.num_free) == (2, 2)
    allocator.check_integrity()
    assert (len(allocator.try_allocate(2) or []), gate.waits) == (2, 1)

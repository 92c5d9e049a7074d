"""Chains of pages: what is found, and what goes first. Random orders: tests/property/runtime_service/test_prefix_index.py."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from runtime_service.kv.allocator import PageAllocator
from runtime_service.kv.prefix_index import Prefix
from shared.ids import PageId
from tests.support.prefixes import Colliding


def publish(allocator: PageAllocator, pages: Sequence[tuple[int, ...]], salt: str = "") -> list[PageId]:
    """A chain of owned pages that hold `pages`."""
    taken = allocator.try_allocate(len(pages))
    assert taken is not None
    parent: Prefix | str = salt
    for page, tokens in zip(taken, pages, strict=True):
        parent = allocator.publish(parent, tokens, page)
    return taken


def found(allocator: PageAllocator, pages: Sequence[tuple[int, ...]], salt: str = "") -> list[PageId]:
    """As much of a chain as is found."""
    parent: Prefix | str = salt
    for tokens in pages:
        following = allocator.find(parent, tokens)
        if following is None:
            break
        parent = following
    return parent.pages if isinstance(parent, Prefix) else []


CHAIN = [(i,) * 4 for i in range(4)]


def test_whole_token_ids_tell_pages_apart() -> None:
    """BR-039."""
    allocator = PageAllocator(4)
    publish(allocator, [(77,) * 16])
    for other in (333, 77 + 65536, 77 + 2**32):
        assert found(allocator, [(other,) * 16]) == []
    assert len(found(allocator, [(77,) * 16])) == 1


def test_an_equal_hash_is_no_hit() -> None:
    """BR-040."""
    one, other = (tuple(map(Colliding, range(start, start + 16))) for start in (0, 100))
    assert hash(("", one)) == hash(("", other))
    allocator = PageAllocator(4)
    publish(allocator, [one])
    assert found(allocator, [other]) == []
    assert len(found(allocator, [one])) == 1


def test_the_same_tokens_behind_others_or_under_another_salt_are_not_found() -> None:
    allocator = PageAllocator(9)
    publish(allocator, CHAIN, salt="a")
    assert found(allocator, CHAIN[1:], salt="a") == []
    assert found(allocator, CHAIN) == found(allocator, CHAIN, salt="b") == []
    assert len(found(allocator, [*CHAIN[:2], CHAIN[3]], salt="a")) == 2


def test_without_its_head_nothing_of_a_chain_is_reused_and_the_tail_goes_first() -> None:
    """BR-041: a prefix does not count on beyond a page that has gone."""
    allocator = PageAllocator(5)
    pages = publish(allocator, CHAIN)
    allocator.release(pages)
    assert (allocator.num_free, allocator.num_cached) == (4, 4)
    taken = allocator.try_allocate(1)
    assert taken == pages[3:]
    assert found(allocator, CHAIN) == pages[:3]
    allocator.withdraw(pages[:1])
    assert found(allocator, CHAIN) == []
    assert (allocator.num_free, allocator.num_cached) == (3, 0)
    allocator.check_integrity()


def test_of_several_chains_the_one_unused_for_longest_gives_way() -> None:
    allocator = PageAllocator(7)
    old, new = publish(allocator, CHAIN[:2]), publish(allocator, CHAIN[2:])
    allocator.release(old)
    allocator.release(new)
    assert allocator.share(found(allocator, CHAIN[:2])) == old
    allocator.release(old)
    blank = allocator.try_allocate(2)
    assert not {*old, *new} & {*(blank or [])}
    assert allocator.try_allocate(3) == [old[1], *new]  # the last one evicted is handed out first
    assert found(allocator, CHAIN[:2]) == old[:1]


def test_an_owned_page_behind_an_idle_one_is_no_longer_offered_when_that_goes() -> None:
    """Its owner computed the page before it by itself, at the same time as another."""
    allocator = PageAllocator(4)
    (head,) = publish(allocator, CHAIN[:1])
    own, behind = allocator.try_allocate(2) or []
    allocator.publish(allocator.find("", CHAIN[0]) or "", CHAIN[1], behind)
    allocator.release([head])
    assert allocator.try_allocate(1) == [head]
    assert found(allocator, CHAIN[:2]) == []
    assert (allocator.is_shared(behind), allocator.release([own, behind]), allocator.num_cached) == (False, 2, 0)
    allocator.check_integrity()


def test_a_long_chain_comes_and_goes_without_recursion() -> None:
    """A prompt of a million tokens is one chain; what it looks like in a message is one page of it."""
    allocator = PageAllocator(20_001)
    pages = publish(allocator, [(i,) for i in range(20_000)])
    last = allocator.find("", (0,))
    assert len(repr(last)) < 200
    allocator.release(pages)
    assert allocator.try_allocate(10) == pages[-10:]
    allocator.withdraw(pages[:1])
    assert (allocator.num_free, allocator.num_cached) == (20_000 - 10, 0)
    del last
    publish(allocator, [(i,) for i in range(19_000)])
    allocator.withdraw_all()
    allocator.check_integrity()


def test_evicted_pages_change_hands_behind_the_fence() -> None:
    class Gate:
        waits = 0

        def passed(self) -> bool:
            return False

        def wait(self) -> None:
            self.waits += 1

    allocator, gate = PageAllocator(3), Gate()
    pages = publish(allocator, CHAIN[:2])
    allocator.hold_back(gate)
    allocator.release(pages)
    assert sorted(allocator.try_allocate(2) or []) == sorted(pages)
    assert gate.waits > 0


def test_what_nobody_owns_or_is_there_already_is_not_published() -> None:
    allocator = PageAllocator(5)
    first, second = publish(allocator, CHAIN[:2])
    (other,) = allocator.try_allocate(1) or []
    with pytest.raises(ValueError, match="is free already"):
        allocator.publish("", (9,), PageId(4))
    with pytest.raises(ValueError, match=f"page {second} cannot be added"):
        allocator.publish("", (9,), second)
    with pytest.raises(ValueError, match=f"page {other} cannot be added"):
        allocator.publish("", CHAIN[0], other)
    gone = allocator.find("", CHAIN[0])
    assert gone is not None
    allocator.withdraw([first])
    with pytest.raises(ValueError, match=f"page {other} cannot be added"):
        allocator.publish(gone, CHAIN[1], other)
    with pytest.raises(ValueError, match=f"page {PageId(4)} is free already"):
        allocator.share([PageId(4)])

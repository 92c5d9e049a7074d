"""The allocator against a model that only counts owners, and page tables against one long list of cells."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from runtime_service.kv.allocator import DUMP_PAGE, PageAllocator
from runtime_service.kv.page_table import PageTable
from shared.ids import Ordinal, PageId


class AllocatorMachine(RuleBasedStateMachine):
    """`owners` are lists of pages, each holding one reference to each of its pages."""

    @initialize(num_pages=st.integers(2, 12))
    def start(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.allocator = PageAllocator(num_pages)
        self.owners: list[list[PageId]] = []

    def references(self) -> Counter[PageId]:
        return Counter(page for owner in self.owners for page in owner)

    @rule(count=st.integers(0, 12))
    def allocate(self, count: int) -> None:
        free = self.num_pages - 1 - len(self.references())
        pages = self.allocator.try_allocate(count)
        if count > free:
            assert pages is None
        else:
            assert pages is not None
            assert len(set(pages)) == len(pages) == count
            assert not set(pages) & set(self.references())
            assert DUMP_PAGE not in pages
            self.owners.append(pages)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        if self.owners:
            self.owners.append(self.allocator.share(data.draw(st.sampled_from(self.owners))))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.owners:
            owner = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
            cut = data.draw(st.integers(0, len(owner)))
            gone, rest = owner[:cut], owner[cut:]
            self.owners.append(rest)
            assert self.allocator.release(gone) == len(set(gone) - set(self.references()))

    @rule(pages=st.lists(st.integers(-1, 13).map(PageId), min_size=1, max_size=4))
    def release_what_is_not_owned(self, pages: list[PageId]) -> None:
        """Twice the same, none of ours, or free: refused, with nothing changed."""
        if len(set(pages)) == len(pages) and all(page in self.references() for page in pages):
            return
        with pytest.raises(ValueError, match="page"):
            self.allocator.release(pages)

    @invariant()
    def every_page_is_free_or_owned(self) -> None:
        if not hasattr(self, "allocator"):
            return
        references = self.references()
        self.allocator.check_integrity()
        assert self.allocator.num_used == len(references)
        assert self.allocator.num_free + self.allocator.num_used == self.allocator.capacity
        assert self.allocator.num_shared == sum(count > 1 for count in references.values())


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(
    page_size=st.integers(1, 7),
    pages=st.lists(st.integers(1, 99), min_size=1, max_size=9, unique=True),
    extra=st.integers(0, 4),
)
@settings(max_examples=100, deadline=None)
def test_a_table_is_the_pages_cells_laid_end_to_end(page_size: int, pages: list[int], extra: int) -> None:
    cells = [(page, offset) for page in pages for offset in range(page_size)]
    table = PageTable([PageId(p) for p in pages], page_size)
    assert [table.locate(Ordinal(o)) for o in range(table.capacity)] == cells
    slots = [table.slot(Ordinal(o)) for o in range(table.capacity)]
    assert len(set(slots)) == len(slots)
    assert slots == [page * page_size + offset for page, offset in cells]
    assert table.row(len(pages) + extra).tolist() == pages + [0] * extra

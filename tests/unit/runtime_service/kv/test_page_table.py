"""ordinal -> (page, offset) -> slot, and the row an engine reads."""

from __future__ import annotations

import pytest

from runtime_service.kv.page_table import PageTable
from shared.ids import Ordinal, PageId

PAGES = [PageId(7), PageId(3), PageId(9)]


def test_ordinals_walk_the_pages_in_table_order() -> None:
    table = PageTable(PAGES, page_size=4)
    assert [table.locate(Ordinal(o)) for o in (0, 3, 4, 11)] == [(7, 0), (7, 3), (3, 0), (9, 3)]
    assert [table.slot(Ordinal(o)) for o in (0, 3, 4, 11)] == [28, 31, 12, 39]


@pytest.mark.parametrize("ordinal", [-1, 12])
def test_an_ordinal_on_no_page_is_an_error_not_another_page(ordinal: int) -> None:
    with pytest.raises(IndexError, match=f"ordinal {ordinal} is outside the 12 entries of 3 pages"):
        PageTable(PAGES, page_size=4).locate(Ordinal(ordinal))


def test_a_row_names_the_dump_page_where_nothing_is_mapped() -> None:
    """BR-062, BR-063: no entry behind the sequence's own pages names a page that may be somebody else's by now."""
    held = list(PAGES)
    table = PageTable(held, page_size=4)
    assert table.row(5).tolist() == [7, 3, 9, 0, 0]
    del held[1:]
    assert table.row(5).tolist() == [7, 0, 0, 0, 0]
    assert table.capacity == 4


def test_a_row_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="3 pages do not fit a block table 2 wide"):
        PageTable(PAGES, page_size=4).row(2)


def test_the_linear_layout_is_a_table_of_one_slot() -> None:
    table = PageTable([PageId(2)], page_size=16)
    assert table.row(1).tolist() == [2]
    assert table.locate(Ordinal(15)) == (2, 15)

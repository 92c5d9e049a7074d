"""Where the entries of one sequence lie: ordinal -> (page, offset) -> slot. Host only.

    pages of 4      [7, 3, 9]
    ordinal         0 1 2 3 | 4 5 6 7 | 8 9 ..
    page, offset    7,0 ..  | 3,0 ..  | 9,0 ..
    block table     7 3 9 0 0             unmapped entries name the dump page

The linear layout is the same with one page of max_len tokens: its table is `[slot]`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime_service.kv.allocator import DUMP_PAGE
from shared.ids import Ordinal, PageId, Slot


class PageTable:
    """A reading of `pages` as the table of one sequence. Owns nothing and remembers no length: lengths change in rounds."""

    def __init__(self, pages: Sequence[PageId], page_size: int) -> None:
        self.pages = pages
        self.page_size = page_size

    @property
    def capacity(self) -> int:
        """Entries that fit."""
        return len(self.pages) * self.page_size

    def locate(self, ordinal: Ordinal) -> tuple[PageId, int]:
        """(page, offset in it). IndexError when no page holds `ordinal`."""
        if not 0 <= ordinal < self.capacity:
            raise IndexError(f"ordinal {ordinal} is outside the {self.capacity} entries of {len(self.pages)} pages")
        return self.pages[ordinal // self.page_size], ordinal % self.page_size

    def slot(self, ordinal: Ordinal) -> Slot:
        """Flat cell of the pool."""
        page, offset = self.locate(ordinal)
        return Slot(page * self.page_size + offset)

    def row(self, width: int) -> NDArray[np.int32]:
        """The block table row of `width` entries; unmapped ones name the dump page, never a page that was ours once."""
        if len(self.pages) > width:
            raise ValueError(f"{len(self.pages)} pages do not fit a block table {width} wide")
        row = np.full(width, DUMP_PAGE, dtype=np.int32)
        row[: len(self.pages)] = self.pages
        return row

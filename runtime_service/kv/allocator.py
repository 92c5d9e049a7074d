"""Who owns which page of a pool. Host only: ids and counts, no tensors.

    page 0                 the dump page: padding rows and unmapped table entries point there; never handed out
    blank                  reference count 0; held back while work in flight on a device may still touch it
    cached                 reference count 0, in the prefix index: requests may ask for its content until its memory is wanted
    used                   reference count 1 or more; above 1 the page is shared

Blank and cached pages are free: whoever asks for pages gets either. Conservation law, stated by `check_integrity`: blank + cached +
used = all pages but the dump page, shared ones counted once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from runtime_service.kv.prefix_index import Prefix, PrefixIndex
from shared.errors import InternalError
from shared.ids import PageId

DUMP_PAGE = PageId(0)


class Fence(Protocol):
    """A point in a device's work."""

    def passed(self) -> bool: ...

    def wait(self) -> None:
        """Return once it has passed."""
        ...


class PageAllocator:
    """Pages 1..num_pages of one pool. Exhaustion is a return value; a broken promise of the caller raises and changes nothing."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"a pool needs the dump page and at least one more, got num_pages {num_pages}")
        self.num_pages = num_pages
        # A stack: the page released last is handed out next, while its bytes are still in a cache.
        self._blank = [PageId(p) for p in range(num_pages - 1, 0, -1)]
        self._held_back: deque[tuple[Fence, list[PageId]]] = deque()
        self._fence: Fence | None = None
        self._references = [0] * num_pages
        self._num_shared = 0
        self._prefixes = PrefixIndex()

    @property
    def capacity(self) -> int:
        """Pages that can be owned."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        """Pages nobody owns: cached ones, and those held back, which `try_allocate` waits for, included."""
        return self._num_blank + len(self._prefixes.idle)

    @property
    def num_cached(self) -> int:
        """Of the free pages, those whose content may still be asked for."""
        return len(self._prefixes.idle)

    @property
    def num_used(self) -> int:
        """Pages somebody owns, a shared one counted once."""
        return self.capacity - self.num_free

    @property
    def num_shared(self) -> int:
        """Pages of more than one owner."""
        return self._num_shared

    def is_owned(self, page: PageId) -> bool:
        return self._references[page] > 0

    def is_shared(self, page: PageId) -> bool:
        """Whether its owner must not write to `page`: others own it too, or requests to come may be given it."""
        return self._references[page] > 1 or page in self._prefixes

    def try_allocate(self, count: int) -> list[PageId] | None:
        """`count` pages with one reference each, or None, with nothing changed, when fewer are free."""
        if count < 0:
            raise ValueError(f"count must not be negative, got {count}")
        if count > self.num_free:
            return None
        while self._num_blank < count:
            self._blank_out(self._prefixes.evict())
        while self._held_back and (len(self._blank) < count or self._held_back[0][0].passed()):
            fence, pages = self._held_back[0]
            fence.wait()  # a device that fails here takes no page along
            self._held_back.popleft()
            self._blank += pages
        pages = [self._blank.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Sequence[PageId]) -> list[PageId]:
        """One more reference to each of `pages`, used or cached: another owner reads them, nobody writes them. All or nothing."""
        self._check_known(pages)
        for page in pages:
            if self._references[page] == 0:
                self._prefixes.wake(page)
            self._references[page] += 1
            self._num_shared += self._references[page] == 2
        return list(pages)

    def hold_back(self, fence: Fence | None) -> None:
        """What is released from now on is handed out again only behind `fence`: work launched before it may touch any used page.

        None, and a fence that has passed, hold nothing back.
        """
        self._fence = fence

    def release(self, pages: Iterable[PageId]) -> int:
        """Drop one reference to each of `pages`, in the order of their entries; returns how many became free.

        ValueError, with nothing changed, for a page listed twice (one owner holds one reference), free already, or none of ours.
        """
        pages = list(pages)
        self._check_owned(pages)
        for page in pages:
            self._references[page] -= 1
            self._num_shared -= self._references[page] == 1
        freed = [page for page in pages if self._references[page] == 0]
        self._blank_out(self._prefixes.rest(freed))
        return len(freed)

    # ---- pages that requests to come may go on from ----

    def find(self, parent: Prefix | str, tokens: tuple[int, ...]) -> Prefix | None:
        """The page that holds exactly `tokens` behind `parent`, a prefix or a salt. `share` it before it is used."""
        return self._prefixes.find(parent, tokens)

    def holds(self, prefix: Prefix | str) -> bool:
        """Whether `prefix` can still be found; a salt always can."""
        return self._prefixes.holds(prefix)

    def publish(self, parent: Prefix | str, tokens: tuple[int, ...], page: PageId) -> Prefix:
        """Let `page`, an owned one that is full and never written again, be found. Unowned, it is cached instead of blank."""
        self._check_owned([page])
        return self._prefixes.add(parent, tokens, page)

    def withdraw(self, pages: Iterable[PageId]) -> None:
        """Let neither `pages` nor what lies behind them be found again."""
        for page in pages:
            self._blank_out(self._prefixes.forget(page))

    def withdraw_all(self) -> None:
        self._blank_out(self._prefixes.clear())

    # ---- the law ----

    def check_integrity(self) -> None:
        """InternalError unless free and used pages are disjoint, together all pages but the dump page, and rightly counted."""
        listed = [*self._blank, *(page for _, pages in self._held_back for page in pages), *self._prefixes.idle]
        free = set(listed)
        referenced = {p for p, count in enumerate(self._references) if count > 0}
        everything = set(range(1, self.num_pages))
        if len(free) != len(listed) or free & referenced or free | referenced != everything or min(self._references) < 0:
            raise InternalError(
                f"page accounting is broken: {len(listed)} free ({len(free)} distinct) + {len(referenced)} used "
                f"should be {self.capacity}; both free and used: {sorted(free & referenced)[:8]}, "
                f"lost: {sorted(everything - free - referenced)[:8]}"
            )
        if (shared := sum(count > 1 for count in self._references)) != self._num_shared:
            raise InternalError(f"page accounting is broken: {shared} pages are shared, {self._num_shared} are counted")

    @property
    def _num_blank(self) -> int:
        return len(self._blank) + sum(len(pages) for _, pages in self._held_back)

    def _blank_out(self, pages: list[PageId]) -> None:
        """`pages` hold nothing any more; they change hands behind the fence, and behind those that went before them: their order
        does not depend on when a device got there."""
        if self._fence is None or (not self._held_back and self._fence.passed()):
            self._fence = None
            self._blank += pages
        elif pages:
            self._held_back.append((self._fence, pages))

    def _check_owned(self, pages: Sequence[PageId]) -> None:
        self._check_known(pages)
        for page in pages:
            if self._references[page] == 0:
                raise ValueError(f"page {page} is free already")

    def _check_known(self, pages: Sequence[PageId]) -> None:
        if len(set(pages)) != len(pages):
            twice = sorted({p for p in pages if pages.count(p) > 1})
            raise ValueError(f"pages {twice[:8]} are listed twice; an owner holds one reference to a page")
        for page in pages:
            if not 0 < page < self.num_pages:
                raise ValueError(f"page {page} is none of 1..{self.num_pages - 1} that this pool hands out")
            if self._references[page] == 0 and page not in self._prefixes:
                raise ValueError(f"page {page} is free already")

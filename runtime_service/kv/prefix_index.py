"""Which page holds which tokens, behind which other pages: what later requests may go on from. Host only; knows no sequence.

    salt "" ── page 7 (t0 t1 t2 t3) ──┬── page 3 (t4 t5 t6 t7) ── page 9 (t8 t9 t10 t11)
                                      └── page 4 (u4 u5 u6 u7)

A full page is found by its whole tokens and the page before it, the first one by its tokens and the salt: a chain is equal token by
token, never just of equal hash, and chains of two salts never meet.

A page is *idle* while nobody owns it: it stays until its memory is wanted. The one idle for longest goes first, but never before
the idle pages behind it, so what is left of a chain is still found from its head (BR-041). What lies behind a page that goes can
never be found again, so it leaves the index too; whoever owns such a page keeps it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from shared.ids import PageId


@dataclass(slots=True, eq=False)
class Prefix:
    """The `depth` pages that end with `page`. `parent` is the prefix before, or the salt that the first page is found under."""

    parent: Prefix | str = field(repr=False)
    tokens: tuple[int, ...]
    page: PageId
    depth: int
    children: dict[Prefix, None] = field(default_factory=dict, repr=False)
    idle_since: int = 0

    @property
    def pages(self) -> list[PageId]:
        """The chain's pages, head first."""
        pages, prefix = [], self
        while True:
            pages.append(prefix.page)
            if isinstance(prefix.parent, str):
                return pages[::-1]
            prefix = prefix.parent


class PrefixIndex:
    """A page is in it once at most. Its owner says when a page falls idle and when somebody owns it again."""

    def __init__(self) -> None:
        self._prefixes: dict[tuple[Prefix | str, tuple[int, ...]], Prefix] = {}
        self._by_page: dict[PageId, Prefix] = {}
        self._idle: dict[PageId, Prefix] = {}  # in the order of `idle_since`
        self._clock = 0

    def __len__(self) -> int:
        """Pages in it, idle or not."""
        return len(self._by_page)

    def __contains__(self, page: PageId) -> bool:
        return page in self._by_page

    @property
    def idle(self) -> Collection[PageId]:
        """Those idle for longest first."""
        return self._idle.keys()

    def holds(self, prefix: Prefix | str) -> bool:
        """Whether `prefix` can still be found; a salt always can."""
        return isinstance(prefix, str) or self._by_page.get(prefix.page) is prefix

    def find(self, parent: Prefix | str, tokens: tuple[int, ...]) -> Prefix | None:
        """The page with exactly `tokens` behind `parent`."""
        return self._prefixes.get((parent, tokens))

    def add(self, parent: Prefix | str, tokens: tuple[int, ...], page: PageId) -> Prefix:
        """`page`, owned by somebody, holds `tokens` behind `parent`. ValueError if its place or it is taken, or the parent gone."""
        if not self.holds(parent) or page in self._by_page or (parent, tokens) in self._prefixes:
            raise ValueError(
                f"page {page} cannot be added: it is there, or another with its tokens is, or what it lies behind has left"
            )
        added = Prefix(parent, tokens, page, 1 if isinstance(parent, str) else parent.depth + 1)
        self._prefixes[parent, tokens] = self._by_page[page] = added
        if isinstance(parent, Prefix):
            parent.children[added] = None
        return added

    def rest(self, pages: Iterable[PageId]) -> list[PageId]:
        """Nobody owns `pages` any more, given head first: those of the index fall idle, the others are returned."""
        others = []
        for page in reversed(list(pages)):
            prefix = self._by_page.get(page)
            if prefix is None:
                others.append(page)
                continue
            self._clock += 1
            prefix.idle_since = self._clock
            self._idle[page] = prefix
        return others[::-1]

    def wake(self, page: PageId) -> None:
        """Somebody owns an idle page again."""
        del self._idle[page]

    def evict(self) -> list[PageId]:
        """Give up the page that is wanted least, one of those idle. Returns it, and idle ones that are lost with it.

        More than one only where an idle page lies behind one that somebody owns, and that behind the page given up.
        """
        prefix = next(iter(self._idle.values()))
        while behind := [child for child in prefix.children if child.page in self._idle]:
            prefix = min(behind, key=lambda child: child.idle_since)
        return self.forget(prefix.page)

    def forget(self, page: PageId) -> list[PageId]:
        """Take `page`, if it is there, and all that lies behind it out of the index. Returns those of them that were idle."""
        prefix = self._by_page.get(page)
        if prefix is None:
            return []
        if isinstance(prefix.parent, Prefix):
            del prefix.parent.children[prefix]
        idle, leaving = [], [prefix]
        while leaving:
            gone = leaving.pop()
            leaving += gone.children
            gone.children.clear()
            del self._prefixes[gone.parent, gone.tokens], self._by_page[gone.page]
            if self._idle.pop(gone.page, None) is not None:
                idle.append(gone.page)
        return idle

    def clear(self) -> list[PageId]:
        """Forget everything. Returns the pages that were idle."""
        idle = list(self._idle)
        self._prefixes.clear()
        self._by_page.clear()
        self._idle.clear()
        return idle

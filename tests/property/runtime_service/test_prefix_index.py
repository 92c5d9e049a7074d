"""Published pages against a model that writes every chain out in full, from its salt on."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runtime_service.kv.allocator import PageAllocator
from runtime_service.kv.prefix_index import Prefix
from shared.ids import PageId

Chain = tuple[str | tuple[int, ...], ...]
"""A salt, and the tokens of each page behind it."""
TOKENS = st.tuples(st.integers(0, 2))


class PublishedPages(RuleBasedStateMachine):
    """`owners` hold one reference to each of their pages; `chains` is what can be found, `idle` the pages of it that nobody owns,
    those longest idle first."""

    @initialize(num_pages=st.integers(2, 10))
    def start(self, num_pages: int) -> None:
        self.allocator = PageAllocator(num_pages)
        self.owners: list[list[PageId]] = []
        self.chains: dict[Chain, PageId] = {}
        self.idle: list[PageId] = []

    def owned(self) -> Counter[PageId]:
        return Counter(page for owner in self.owners for page in owner)

    def find(self, chain: Chain) -> Prefix | str | None:
        salt, *pages = chain
        found: Prefix | str | None = salt
        for tokens in pages:
            found = None if found is None else self.allocator.find(found, tokens)
        return found

    def lose(self, lost: Chain) -> None:
        self.chains = {chain: page for chain, page in self.chains.items() if chain[: len(lost)] != lost}
        self.idle = [page for page in self.idle if page in self.chains.values()]

    @rule(count=st.integers(1, 5))
    def allocate(self, count: int) -> None:
        """Blank pages first, then idle ones, one by one: the longest idle, or else what lies idle behind it."""
        num_blank = self.allocator.capacity - len(self.owned()) - len(self.idle)
        pages = self.allocator.try_allocate(count)
        assert (pages is None) == (count > num_blank + len(self.idle))
        if pages is None:
            return
        while num_blank < count:
            (oldest,) = (chain for chain, page in self.chains.items() if page == self.idle[0])
            gone = [chain for chain, page in self.chains.items() if page in self.idle and self.find(chain) is None]
            (given_up, *_) = [chain for chain in gone if chain[: len(oldest)] == oldest and self.has_nothing_idle_behind(chain)]
            num_idle = len(self.idle)
            self.lose(given_up)
            num_blank += num_idle - len(self.idle)
        assert not set(pages) & {*self.owned(), *self.idle}
        self.owners.append(pages)

    def has_nothing_idle_behind(self, chain: Chain) -> bool:
        return not any(other[:-1] == chain and page in self.idle for other, page in self.chains.items())

    @precondition(lambda self: self.owned())
    @rule(data=st.data(), tokens=TOKENS, salt=st.sampled_from(["", "tenant"]))
    def publish(self, data: st.DataObject, tokens: tuple[int, ...], salt: str) -> None:
        page = data.draw(st.sampled_from(sorted(self.owned())))
        parent = data.draw(st.sampled_from([(salt,), *self.chains]))
        chain = (*parent, tokens)
        if page in self.chains.values() or chain in self.chains:
            return
        published = self.allocator.publish(self.find(parent), tokens, page)
        self.chains[chain] = page
        assert published.pages == [self.chains[chain[: length + 1]] for length in range(1, len(chain))]

    @precondition(lambda self: self.chains)
    @rule(data=st.data())
    def go_on_from_a_chain(self, data: st.DataObject) -> None:
        found = self.find(data.draw(st.sampled_from(list(self.chains))))
        self.owners.append(self.allocator.share(found.pages))
        self.idle = [page for page in self.idle if page not in found.pages]

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        owner = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        freed = [page for page in owner if page not in self.owned()]
        assert self.allocator.release(owner) == len(freed)
        self.idle += [page for page in reversed(freed) if page in self.chains.values()]

    @rule(page=st.integers(1, 9).map(PageId))
    def withdraw(self, page: PageId) -> None:
        self.allocator.withdraw([page])
        for chain in [chain for chain, published in self.chains.items() if published == page]:
            self.lose(chain)

    @rule(really=st.sampled_from([False] * 9 + [True]))
    def withdraw_all(self, really: bool) -> None:
        if really:
            self.allocator.withdraw_all()
            self.chains, self.idle = {}, []

    @invariant()
    def blank_cached_and_used_pages_are_all_and_every_chain_is_found(self) -> None:
        """BR-033, BR-041."""
        if not hasattr(self, "allocator"):
            return
        self.allocator.check_integrity()
        owned = self.owned()
        assert (self.allocator.num_used, self.allocator.num_cached) == (len(owned), len(self.idle))
        assert self.allocator.num_free == self.allocator.capacity - len(owned)
        for chain, page in self.chains.items():
            found = self.find(chain)
            assert isinstance(found, Prefix)
            assert (found.page, found.depth) == (page, len(chain) - 1)
            assert self.find((*chain, (9,))) is None
        for page in range(1, self.allocator.num_pages):
            published = page in self.chains.values()
            assert self.allocator.is_shared(PageId(page)) == (published or owned[PageId(page)] > 1)


TestPublishedPages = PublishedPages.TestCase
TestPublishedPages.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)

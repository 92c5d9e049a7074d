"""What sequences leave for one another: pages of computed tokens that a later one with the same first tokens goes on from.

    publish    after every step, the pages it has filled; the engine call that writes them has been launched
    find       before a sequence computes anything: the longest chain of pages that hold its first tokens
    forget     it has ended; what it published stays behind as the pool's cached pages

Only full pages, and only until a round: entries that a round has put together are nobody's prefix. What the next step needs is
always left to compute: the last token, whose logits are wanted, and of a sequence that is to be compacted the token that brings its
round about.

Two sequences may fill a page with the same tokens at the same time. The first to publish it is found from then on; the other keeps
its own page, and what it fills behind that is found behind the first one's.
"""

from __future__ import annotations

from runtime_service.core.sequence import Sequence
from runtime_service.kv.allocator import PageAllocator
from runtime_service.kv.prefix_index import Prefix
from shared.ids import PageId
from shared.kv_spec import KVCacheSpec, Layout


def can_share(spec: KVCacheSpec) -> bool:
    """Whether requests can share a pool's pages at all: the page of a linear pool is one sequence's whole cache."""
    return spec.layout is Layout.PAGED


class PrefixCache:
    """Of one pool with pages of `page_size` tokens. One that is not `enabled` publishes nothing, and so finds nothing."""

    def __init__(self, allocator: PageAllocator, page_size: int, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self._allocator = allocator
        self._page_size = page_size
        # How far a sequence's tokens are known to be published; whoever asks again goes on from there.
        self._reached: dict[Sequence, Prefix | str] = {}

    def find(self, sequence: Sequence) -> list[PageId]:
        """Pages that hold the next tokens of `sequence`, which has computed none itself. They are still to be shared with it."""
        if not self.enabled:
            return []
        held = sequence.computed // self._page_size
        most = sequence.logical_len if sequence.room is None else min(sequence.logical_len, sequence.computed + sequence.room)
        limit = (most - 1) // self._page_size
        reached = self._last_reached(sequence)
        while _depth(reached) < limit:
            following = self._allocator.find(reached, self._tokens(sequence, _depth(reached)))
            if following is None:
                break
            reached = following
        self._reached[sequence] = reached
        return reached.pages[held:limit] if isinstance(reached, Prefix) and reached.depth > held else []

    def publish(self, sequence: Sequence) -> None:
        """A step of `sequence` has been launched. Pages with tokens that the host has not seen have to wait until it has."""
        known = (sequence.computed - sequence.unseen) // self._page_size
        if known <= _depth(self._reached.get(sequence, "")) or sequence.is_compacted or not self.enabled:
            return
        reached = self._last_reached(sequence)
        for index in range(_depth(reached), known):
            tokens = self._tokens(sequence, index)
            reached = self._allocator.find(reached, tokens) or self._allocator.publish(reached, tokens, sequence.pages[index])
        self._reached[sequence] = reached

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """`child` goes on from what `parent` has computed."""
        if parent in self._reached:
            self._reached[child] = self._reached[parent]

    def forget(self, sequence: Sequence) -> None:
        self._reached.pop(sequence, None)

    def _last_reached(self, sequence: Sequence) -> Prefix | str:
        """Where it was left, or its salt when that has been evicted meanwhile."""
        salt = sequence.request.cache_salt
        reached = self._reached.get(sequence, salt)
        return reached if self._allocator.holds(reached) else salt

    def _tokens(self, sequence: Sequence, index: int) -> tuple[int, ...]:
        """Of one page."""
        return tuple(sequence.tokens[index * self._page_size : (index + 1) * self._page_size])


def _depth(prefix: Prefix | str) -> int:
    return 0 if isinstance(prefix, str) else prefix.depth

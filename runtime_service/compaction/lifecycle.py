"""The life of a sequence's cache, told to what keeps something beside it: a draft's cache, say.

    started -> step_ended ... context_ended -> step_ended ... ended
    forked  ------------------------------------------^

A life begins with the first chunk and ends with the cache: when the sequence finishes, is aborted or is preempted. A preempted one
that runs again starts another life.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from runtime_service.core.sequence import Sequence


class CacheLifecycle(Protocol):
    """Each call comes once, on the loop's thread, in stream order with the steps and rounds around it."""

    def started(self, sequence: Sequence) -> None:
        """Its first chunk runs next."""
        ...

    def forked(self, parent: Sequence, child: Sequence) -> None:
        """`child` holds what `parent` holds and decodes next. It never had a first chunk."""
        ...

    def context_ended(self, sequence: Sequence) -> None:
        """Everything it started with has been computed; it decodes next."""
        ...

    def step_ended(self, alive: Collection[Sequence]) -> None:
        """An engine call is over; rounds have yet to run. `alive`: every sequence whose life has begun and not ended."""
        ...

    def ended(self, sequence: Sequence) -> None:
        """Its cache is gone."""
        ...


class Lifecycles:
    """Turns what the session and the scheduler see into each follower's calls."""

    def __init__(self, followers: Iterable[CacheLifecycle] = ()) -> None:
        self._followers = tuple(followers)
        self._alive: dict[Sequence, None] = {}
        self._in_context: set[Sequence] = set()

    def step_begins(self, batch: Iterable[Sequence]) -> None:
        for sequence in batch:
            if sequence not in self._alive:
                self._alive[sequence] = None
                self._in_context.add(sequence)
                for follower in self._followers:
                    follower.started(sequence)

    def step_ends(self, batch: Iterable[Sequence]) -> None:
        """The tokens of `batch` have been computed and counted, and nothing was sampled yet."""
        for sequence in batch:
            if sequence in self._in_context and sequence.remaining == 0:
                self._in_context.remove(sequence)
                for follower in self._followers:
                    follower.context_ended(sequence)
        for follower in self._followers:
            follower.step_ended(self._alive.keys())

    def forks(self, parent: Sequence, child: Sequence) -> None:
        self._alive[child] = None
        for follower in self._followers:
            follower.forked(parent, child)

    def ends(self, sequence: Sequence) -> None:
        """Its pages are released. Nothing happens for a sequence that never ran."""
        if sequence in self._alive:
            del self._alive[sequence]
            self._in_context.discard(sequence)
            for follower in self._followers:
                follower.ended(sequence)

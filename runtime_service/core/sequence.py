"""One sample of a request: its tokens, and what the cache holds of them.

Two lengths. *Logical*: `tokens` (prompt and generated) and `computed`, how many of them have gone through the engine; they
never shrink while the sequence runs, and a token's position is its index. *Physical*: the entries the cache holds, in ordinal
order; a compaction round shrinks it. The map ordinal -> position (`core/entries.py`) is stored once, and the physical length is
its size, so the two cannot drift apart.

    tokens      t0 t1 t2 t3 t4 t5 t6 t7 | t8        computed = 8, t8 goes next, at position 8
    positions   0  1  5  6  7                       physical length 5: t8 is written at ordinal 5

Preemption forgets the cache, not the tokens. The rounds that ran are remembered and replayed at the same logical lengths with
the same decisions, so a recomputed sequence holds the entries it held before and goes on as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from runtime_service.core.entries import EntryMap, Rows, ordinals_of
from runtime_service.core.evidence import CompactionEvidence
from runtime_service.core.request import GenerationRequest
from shared.ids import PageId

UNSEEN = 0
"""Stands in `tokens` for a token that the device has and the host has not: any id the engine would take."""


class Status(StrEnum):
    """WAITING -> RUNNING -> FINISHED; RUNNING -> WAITING when preempted; WAITING -> FINISHED when it never got to run."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


_NEXT: dict[Status, tuple[Status, ...]] = {
    Status.WAITING: (Status.RUNNING, Status.FINISHED),
    Status.RUNNING: (Status.WAITING, Status.FINISHED),
    Status.FINISHED: (),
}


@dataclass(frozen=True, slots=True, eq=False)
class RoundRecord:
    """A compaction round of one sequence: `computed` when it ran, and the ordinals it evicted, ascending in each row.

    What was evicted rather than what was kept: over a sequence's life that is at most one number a token and row.
    """

    at: int
    evicted: Rows


class Sequence:
    """Sample `index` of `request`. `arrival` orders sequences that have the same priority."""

    def __init__(self, request: GenerationRequest, index: int, arrival: int) -> None:
        self.request = request
        self.index = index
        self.arrival = arrival
        self.tokens: list[int] = list(request.prompt_ids)
        self.computed = 0
        self.reused = 0
        self.unseen = 0
        self.entries = EntryMap.empty()
        self.pages: list[PageId] = []
        self.status = Status.WAITING
        self.rounds: list[RoundRecord] = []
        self.replayed = 0
        self.preemptions = 0
        self.evidence = CompactionEvidence()

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.request_id}.{self.index} {self.status}, {len(self.tokens)} tokens, "
            f"{self.computed} computed, {self.physical_len} held on {len(self.pages)} pages)"
        )

    @property
    def logical_len(self) -> int:
        """Tokens, prompt included."""
        return len(self.tokens)

    @property
    def physical_len(self) -> int:
        """KV entries the cache holds."""
        return self.entries.length(self.computed)

    @property
    def positions(self) -> Rows:
        """Position of each entry, int32 `[rows, physical_len]`; one row where all heads hold the same entries."""
        return self.entries.positions(self.computed)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.unseen - len(self.request.prompt_ids)

    @property
    def may_go_on(self) -> bool:
        """Whether the token that is sampled next may be followed by another."""
        return len(self.tokens) + 1 - len(self.request.prompt_ids) < self.request.stop.max_tokens

    @property
    def remaining(self) -> int:
        """Tokens that are known and not computed. 1 = the sequence decodes; more = it prefills (or recomputes)."""
        return len(self.tokens) - self.computed

    @property
    def rank(self) -> tuple[int, int]:
        """Sorts what runs first to the front."""
        return (-self.request.priority, self.arrival)

    @property
    def has_stepped(self) -> bool:
        """Whether it has computed anything since it started, beyond what it found computed."""
        return self.computed > self.reused

    @property
    def is_compacted(self) -> bool:
        """Whether a round has run since it started."""
        return self.replayed > 0

    @property
    def is_replaying(self) -> bool:
        """Rounds that ran before a preemption have yet to run again."""
        return self.replayed < len(self.rounds)

    @property
    def room(self) -> int | None:
        """Tokens that may be computed before a round must run; None = no round ever does."""
        if self.is_replaying:
            return self.rounds[self.replayed].at - self.computed
        if self.request.compaction is None:
            return None
        return self.request.compaction.budget + self.request.compaction.interval - self.physical_len

    @property
    def round_is_due(self) -> bool:
        return self.room is not None and self.room <= 0

    def start(self) -> None:
        self._become(Status.RUNNING)

    def resume(self, pages: Ordered[PageId], page_size: int) -> list[PageId]:
        """Its next tokens have been computed by others and fill `pages`; it has computed none itself.

        Returns the pages it held for these tokens, now the caller's to release.
        """
        assert not self.has_stepped, self
        own = slice(self.computed // page_size, self.computed // page_size + len(pages))
        replaced, self.pages[own] = self.pages[own], pages
        self.computed = self.reused = self.computed + len(pages) * page_size
        return replaced

    def fork(self, parent: Sequence, pages: Iterable[PageId]) -> None:
        """Start with what `parent` has computed of the same prompt, rounds included, on `pages`, which hold the same entries."""
        assert parent.tokens == self.tokens, (parent, self)
        self.start()
        self.hold(pages)
        self.computed = parent.computed
        self.entries = parent.entries
        self.rounds = list(parent.rounds)
        self.replayed = parent.replayed

    def advance(self, num_tokens: int) -> None:
        """The engine wrote the next `num_tokens` tokens behind what the cache held. Called once a step, after it."""
        assert 0 < num_tokens <= self.remaining, (num_tokens, self)
        self.computed += num_tokens

    def expect(self) -> None:
        """The token behind the last one is being sampled on the device: a step may take it there before the host has seen it."""
        assert self.remaining == 0, self
        self.tokens.append(UNSEEN)
        self.unseen += 1

    def append(self, token_id: int) -> None:
        """A token was sampled from the logits of the last one, or the first that was expected has arrived.

        The last one of all is expected by nobody, as no step follows it: it may find its sequence preempted meanwhile, and even
        being computed again.
        """
        if self.unseen:
            self.tokens[-self.unseen] = token_id
            self.unseen -= 1
            return
        assert self.remaining == 0 or not self.may_go_on, self
        self.tokens.append(token_id)

    def compact(self, order: Rows, pages: Ordered[PageId]) -> list[PageId]:
        """A round put the entry of ordinal `order[r, o]` at ordinal o, for every o below the new length, and dropped the rest.

        `pages` hold them from now on. Returns the pages it held and holds no more, now the caller's to release.
        """
        if not self.is_replaying:
            self.rounds.append(RoundRecord(self.computed, _others(order, self.physical_len)))
        self.replayed += 1
        self.entries = self.entries.reordered(order, self.computed)
        kept = set(pages)
        dropped = [page for page in self.pages if page not in kept]
        self.pages = list(pages)
        return dropped

    def remembered_round(self) -> Rows:
        """The ordinals that the next round to replay kept."""
        return _others(self.rounds[self.replayed].evicted, self.physical_len)

    def preempt(self) -> list[PageId]:
        """Back to WAITING with nothing computed. Returns the pages it held, now the caller's to release."""
        self._become(Status.WAITING)
        self.preemptions += 1
        return self._drop_cache()

    def finish(self) -> list[PageId]:
        """To FINISHED, for ever. Returns the pages it held, now the caller's to release."""
        self._become(Status.FINISHED)
        return self._drop_cache()

    def hold(self, pages: Iterable[PageId]) -> None:
        """It owns `pages` from now on, behind those it has."""
        self.pages.extend(pages)

    def _drop_cache(self) -> list[PageId]:
        pages, self.pages = self.pages, []
        self.computed = self.reused = self.replayed = 0
        self.entries = EntryMap.empty()
        return pages

    def _become(self, status: Status) -> None:
        assert status in _NEXT[self.status], f"{self} cannot become {status}"
        self.status = status


def _others(ordinals: Rows, length: int) -> Rows:
    """The ordinals below `length` that are not in a row, ascending; every row has as many."""
    absent = np.ones((len(ordinals), length), dtype=bool)
    absent[np.arange(len(ordinals))[:, None], ordinals] = False
    return ordinals_of(absent)

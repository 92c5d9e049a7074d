"""A serving loop whose engine has a draft's cache beside it, written by the test in place of a draft model.

A cell of the draft holds a number made of the token, its position, layer and head, so what a round or a fork should have left where
is known from the target's own map of entries.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from runtime_service.compaction.draft import DraftCache
from runtime_service.core.sequence import Sequence
from runtime_service.kv.allocator import PageAllocator
from runtime_service.kv.page_table import PageTable
from runtime_service.kv.pool import KVPool
from runtime_service.loop import ServingLoop
from runtime_service.session.session import EngineSession
from shared.ids import Ordinal
from shared.kv_spec import DType, KVCacheSpec, LayerGroup, Layout
from shared.profiles import Phase
from tests.support.serving import serving
from tests.support.tiny_engine import TinyEngine, tiny_tokenizer

HEADS, LAYERS = 3, 2
"""Of the draft; the target has 2 of each."""


class DraftWriter:
    """Follows the lifecycle behind the draft's cache, and writes each entry when the target has computed it."""

    def __init__(self, draft: DraftCache) -> None:
        self.draft = draft
        self._written: dict[Sequence, int] = {}

    def started(self, sequence: Sequence) -> None:
        self.draft.started(sequence)
        self._written[sequence] = 0

    def forked(self, parent: Sequence, child: Sequence) -> None:
        self.draft.forked(parent, child)
        self._written[child] = self._written[parent]

    def context_ended(self, sequence: Sequence) -> None:
        self.draft.context_ended(sequence)

    def step_ended(self, alive: Collection[Sequence]) -> None:
        self.draft.step_ended(alive)
        for sequence in alive:
            for back in range(sequence.computed - self._written[sequence], 0, -1):
                page, offset = self._cell(sequence, sequence.physical_len - back)
                for layer in range(LAYERS):
                    value = payload(sequence, sequence.computed - back, layer)
                    self.draft.pool.by_page(layer)[page, :, :, offset] = value[None, :, None]
            self._written[sequence] = sequence.computed

    def ended(self, sequence: Sequence) -> None:
        self.draft.ended(sequence)
        del self._written[sequence]

    def check(self) -> None:
        """Every entry of every sequence lies where the target's map says, in the draft's own pages."""
        self.draft.allocator.check_integrity()
        for sequence in self._written:
            (positions,) = sequence.positions.tolist()
            for ordinal, position in enumerate(positions):
                page, offset = self._cell(sequence, ordinal)
                for layer in range(LAYERS):
                    got = self.draft.pool.by_page(layer)[page, :, :, offset]
                    assert torch.equal(got, payload(sequence, position, layer)[None, :, None].expand_as(got)), (sequence, ordinal)

    def _cell(self, sequence: Sequence, ordinal: int) -> tuple[int, int]:
        return PageTable(self.draft.pages(sequence), self.draft.pool.spec.page_size).locate(Ordinal(ordinal))


def payload(sequence: Sequence, position: int, layer: int) -> torch.Tensor:
    """float32 `[HEADS]`, exact."""
    token = sequence.tokens[position]
    return torch.tensor([float(((token * 64 + position) * LAYERS + layer) * HEADS + head) for head in range(HEADS)])


def drafted_serving(engine: TinyEngine, num_pages: int) -> tuple[ServingLoop, EngineSession, DraftWriter]:
    """A loop that serves `engine` as `tiny`, with a draft's cache beside it."""
    loop = serving(engine, num_pages)
    return loop, *attach_draft(loop, "tiny", engine, num_pages)


def attach_draft(loop: ServingLoop, name: str, engine: TinyEngine, num_pages: int) -> tuple[EngineSession, DraftWriter]:
    """Serve a loaded engine, to which no request has come yet, with a draft's cache whose pages are not the target's size."""
    plain, cache = loop._sessions[name], engine.manifest.cache
    group = LayerGroup(tuple(range(LAYERS)), HEADS, head_dim=4, dtype=DType.FLOAT32)
    spec = KVCacheSpec((group,), Layout.PAGED, 2 * cache.page_size, cache.max_len)
    max_sequences = engine.manifest.profiles[Phase.DECODE].batch.max
    draft_pages = max_sequences * spec.max_pages + 1 + max_sequences  # some to spare, for copies of shared ones
    draft = DraftCache(KVPool(spec, draft_pages), PageAllocator(draft_pages), max_sequences)
    told = {"clock": plain._clock, "on_end": plain.requests._on_end, "deliver": plain._deliver}
    session = EngineSession(name, engine, tiny_tokenizer(), num_pages, **told, draft=draft)
    writer = DraftWriter(draft)
    session.lifecycles._followers = (writer,)
    loop._sessions[name] = session
    return session, writer

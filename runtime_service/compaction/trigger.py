"""When a round runs: after the step that used up the interval, or before a step that no free page is left for."""

from __future__ import annotations

from collections.abc import Iterable

from runtime_service.core.sequence import Sequence
from shared.kv_spec import KVCacheSpec


def due(sequences: Iterable[Sequence]) -> list[Sequence]:
    """Sequences that must not compute another token before a round; those that compute no more need none."""
    return [s for s in sequences if s.remaining and s.round_is_due]


def reserve(sequence: Sequence, kept: int) -> int:
    """Entries to leave room for when `kept` survive: what is known but not computed was promised its pages at admission."""
    return min(kept + sequence.remaining, sequence.request.max_physical)


def relief(sequences: Iterable[Sequence], spec: KVCacheSpec) -> Sequence | None:
    """The decoding sequence whose early round frees most pages, or None when no round frees any.

    A prefilling one is left alone: its pages are promised to tokens it already has.
    """
    best, most = None, 0
    for sequence in sequences:
        compaction = sequence.request.compaction
        if compaction is None or sequence.remaining != 1 or sequence.physical_len <= compaction.budget:
            continue
        freed = len(sequence.pages) - spec.pages_for(reserve(sequence, compaction.budget))
        if freed > most:
            best, most = sequence, freed
    return best

"""When a round runs and what it leaves room for."""

from __future__ import annotations

import pytest

from runtime_service.compaction.trigger import due, relief, reserve
from runtime_service.core.params import CompactionParams
from runtime_service.core.sequence import Sequence
from shared.ids import PageId
from shared.kv_spec import DType, KVCacheSpec, LayerGroup, Layout
from tests.support.serving import request

SPEC = KVCacheSpec((LayerGroup((0,), 1, 2, DType.FLOAT32),), Layout.PAGED, page_size=4, max_len=64)


def held(entries: int, *, budget: int | None = 8, interval: int = 20, prompt: int | None = None) -> Sequence:
    """A sequence with `entries` computed, on just the pages they need; it decodes unless the prompt is longer."""
    compaction = None if budget is None else CompactionParams("sink_recent", budget, interval, sinks=0)
    sequence = Sequence(request([1] * (prompt or entries), 50, compaction=compaction), 0, 0)
    sequence.hold(PageId(p) for p in range(1, SPEC.pages_for(entries) + 1))
    sequence.advance(entries)
    if sequence.remaining == 0:
        sequence.append(1)
    return sequence


@pytest.mark.parametrize(("entries", "expected"), [(27, False), (28, True)])
def test_a_round_is_due_when_the_interval_is_used_up(entries: int, expected: bool) -> None:
    sequence = held(entries)
    assert due([sequence, held(entries, budget=None)]) == ([sequence] if expected else [])


def test_what_is_known_keeps_its_room_and_no_more_than_will_ever_be_held() -> None:
    assert reserve(held(20), kept=8) == 9
    assert reserve(held(20, prompt=24), kept=8) == 12
    assert reserve(held(20, prompt=60), kept=8) == 28


@pytest.mark.parametrize(("entries", "freed"), [(8, -1), (9, 0), (12, 0), (13, 1), (21, 3)])
def test_relief_is_whoever_frees_a_page(entries: int, freed: int) -> None:
    """Eight survivors and the next token take three pages."""
    sequence = held(entries)
    assert len(sequence.pages) - SPEC.pages_for(9) == freed
    assert relief([sequence], SPEC) is (sequence if freed > 0 else None)


def test_relief_prefers_the_most_and_spares_prefills_and_the_uncompacted() -> None:
    small, large = held(14), held(26)
    assert relief([small, large], SPEC) is large
    assert relief([large, small], SPEC) is large
    assert relief([held(26, prompt=40), held(40, budget=None), small], SPEC) is small

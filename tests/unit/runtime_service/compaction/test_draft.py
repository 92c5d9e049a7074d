"""A draft's cache beside a real session: the same entries in its own layers, heads, pages and page size, by the target's decisions.

No draft model writes it; the test does, with a value that says which token of which sequence, layer and head a cell holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count, takewhile

import pytest
import torch

from runtime_service.compaction.draft import DraftCache
from runtime_service.compaction.registry import POLICIES
from runtime_service.compaction.round import Compactor
from runtime_service.core.params import CompactionParams, SamplingParams
from runtime_service.core.sequence import Sequence
from runtime_service.kv.allocator import PageAllocator
from runtime_service.kv.pool import KVPool
from runtime_service.loop import ServingLoop
from shared.errors import FieldOutOfRange
from shared.kernels.compaction.modes import Mode
from shared.kv_spec import DType, KVCacheSpec, LayerGroup, Layout
from tests.support.drafted import drafted_serving
from tests.support.serving import request, rounds_of, submit
from tests.support.tiny_engine import Oracle, TinyEngine

SPEC = KVCacheSpec((LayerGroup((0,), kv_heads=1, head_dim=4, dtype=DType.FLOAT32),), Layout.PAGED, page_size=8, max_len=64)
RECENT = CompactionParams("sink_recent", 12, 6, 2)
both_modes = pytest.mark.parametrize("mode", Mode)


def compaction(mode: Mode, policy: str = "knorm") -> CompactionParams:
    return CompactionParams(policy, 12, 6, 2, mode)


@both_modes
def test_the_draft_holds_the_targets_entries_through_rounds_preemption_forks_and_cancels(mode: Mode) -> None:
    loop, session, writer = drafted_serving(TinyEngine(), num_pages=40)
    sampling = SamplingParams(temperature=0.0, n=2)
    forked, long, cancelled = submit(
        loop,
        request(range(30), 25, compaction=compaction(mode), sampling=sampling),
        request(range(5), 60, compaction=compaction(mode)),
        request(range(9), 60, request_id="cancelled", compaction=compaction(mode, "sink_recent")),
    )
    for turn in turns_of(loop):
        writer.check()
        if turn == 20:
            session.scheduler.preempt(long.sequences[0])
        if turn == 30:
            loop.abort(cancelled.sequences[0].request.request_id)
    assert session.compactor.evidence.rounds == writer.draft.evidence.rounds > 10
    assert writer.draft.evidence.bytes_moved > 0
    for index in range(2):
        expected = Oracle().expected_tokens(range(30), 25, rounds_of(forked.sequences[index]))
        assert forked.tokens(index) == expected
    assert long.usage.preemptions == 1
    assert writer.draft.allocator.num_used == session.allocator.num_used == 0
    writer.draft.allocator.check_integrity()


def turns_of(loop: ServingLoop) -> Iterable[int]:
    """Until nothing is alive, counted from 1."""
    return takewhile(lambda _: loop.turn(), count(1))


@both_modes
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_what_the_draft_wrote_ahead_moves_right_behind_what_is_kept(mode: Mode, ahead: int) -> None:
    """Across a page border of the draft, whose cells behind it are scrubbed; all of the draft's pool compared."""
    target = KVPool(SPEC, num_pages=4)
    pages = PageAllocator(4)
    pool = KVPool(KVCacheSpec(SPEC.groups, Layout.PAGED, page_size=4, max_len=64), num_pages=17)
    pool.tensors[0].copy_(torch.arange(pool.tensors[0].numel()).view_as(pool.tensors[0]) + 1)
    draft = DraftCache(pool, PageAllocator(17), max_sequences=1, max_ahead=3)
    compactor = Compactor(target, pages, POLICIES, max_sequences=1, draft=draft)
    sequence = Sequence(request(range(18), 9, compaction=CompactionParams("sink_recent", 5, 13, 1, mode)), 0, 0)
    sequence.start()
    sequence.hold(pages.try_allocate(3) or [])
    draft.started(sequence)
    sequence.advance(18)
    draft.step_ended([sequence])
    draft.note_ahead(sequence, ahead)
    held = list(draft.pages(sequence))
    assert len(held) == 6  # 18 entries and room for 3 more
    before = pool.by_page(0).clone()

    assert compactor.run([sequence])

    kept = [0, 14, 15, 16, 17]
    assert sequence.positions[0].tolist() == kept
    expected = before.clone()
    for ordinal, source in enumerate([*kept, *range(18, 18 + ahead)]):
        expected[held[ordinal // 4], :, :, ordinal % 4] = before[held[source // 4], :, :, source % 4]
    for ordinal in range(5 + ahead, 8):
        expected[held[1], :, :, ordinal % 4] = 0
    assert torch.equal(pool.by_page(0), expected)
    assert draft.pages(sequence) == held[:2]  # 5 entries and 3 ahead
    draft.ended(sequence)
    assert draft.allocator.num_used == 0


def test_a_draft_ahead_of_its_cells_is_refused() -> None:
    draft = DraftCache(KVPool(SPEC, 9), PageAllocator(9), max_sequences=1, max_ahead=2)
    sequence = Sequence(request([1], 1), 0, 0)
    draft.started(sequence)
    with pytest.raises(ValueError, match="0 to 2 entries ahead, got 3"):
        draft.note_ahead(sequence, 3)


def test_a_pool_that_could_run_out_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="2 sequences of 64 entries take 16 pages of 8; the draft's pool has 15"):
        DraftCache(KVPool(SPEC, 16), PageAllocator(16), max_sequences=2)


def test_a_round_without_pages_for_the_draft_changes_nothing_of_the_target() -> None:
    """BR-038. Both caches take part or neither."""
    target, pages = KVPool(SPEC, 9), PageAllocator(9)
    draft = DraftCache(KVPool(SPEC, 9), PageAllocator(9), max_sequences=1)
    compactor = Compactor(target, pages, POLICIES, max_sequences=2, draft=draft)
    parent, child = (Sequence(request(range(18), 9, compaction=RECENT), index, index) for index in range(2))
    parent.start()
    parent.hold(pages.try_allocate(3) or [])
    draft.started(parent)
    parent.advance(18)
    draft.step_ended([parent])
    child.fork(parent, [*pages.share(parent.pages[:2]), *(pages.try_allocate(1) or [])])
    draft.forked(parent, child)
    draft.allocator.try_allocate(draft.allocator.num_free)
    before = (list(child.pages), child.positions.tolist(), list(draft.pages(child)), pages.num_free)
    assert not compactor.run([child])
    assert (child.pages, child.positions.tolist(), draft.pages(child), pages.num_free) == before
    pages.check_integrity()


def test_a_session_with_a_draft_refuses_what_its_cache_cannot_follow() -> None:
    loop, _, _ = drafted_serving(TinyEngine(), num_pages=40)
    with pytest.raises(FieldOutOfRange, match="follows one decision for all"):
        submit(loop, request(range(5), 5, compaction=CompactionParams("knorm_per_head", 12, 6)))


def test_the_drafts_windows_slide_to_where_the_kept_entries_end() -> None:
    """The draft may be a model of another kind: here one whose layer sees 3 entries only. They are the newest three in both."""
    windowed = KVCacheSpec((LayerGroup((0,), 2, 4, DType.FLOAT32, window=3),), Layout.PAGED, page_size=4, max_len=64)
    pool, target, pages = KVPool(windowed, 17), KVPool(SPEC, 9), PageAllocator(9)
    pool.tensors[0].copy_(torch.arange(pool.tensors[0].numel()).view_as(pool.tensors[0]))
    draft = DraftCache(pool, PageAllocator(17), max_sequences=1)
    sequence = Sequence(request(range(11), 9, compaction=CompactionParams("sink_recent", 5, 6, 4)), 0, 0)
    sequence.hold(pages.try_allocate(2) or [])
    draft.started(sequence)
    sequence.advance(11)
    draft.step_ended([sequence])
    held = list(draft.pages(sequence))
    before = pool.by_page(0).clone()
    Compactor(target, pages, POLICIES, max_sequences=1, draft=draft).run([sequence])
    assert sequence.positions.tolist() == [[0, 1, 2, 3, 10]]
    for ordinal, position in zip((2, 3, 4), (8, 9, 10), strict=True):
        after = pool.by_page(0)[draft.pages(sequence)[ordinal // 4], :, :, ordinal % 4]
        assert torch.equal(after, before[held[position // 4], :, :, position % 4])

"""Scores of the two policies, and what a view shows them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from runtime_service.compaction.decision import keep_best
from runtime_service.compaction.policies.knorm import KNorm
from runtime_service.compaction.policies.sink_recent import SinkRecent
from runtime_service.compaction.policy import KVView
from runtime_service.compaction.registry import POLICIES, check_policy
from runtime_service.core.entries import EntryMap
from runtime_service.core.params import CompactionParams
from runtime_service.core.sequence import Sequence
from runtime_service.kv.pool import K, KVPool
from shared.errors import FieldOutOfRange
from shared.ids import PageId
from shared.kernels.compaction.modes import Mode, RowMode
from shared.kv_spec import DType, KVCacheSpec, LayerGroup, Layout
from shared.manifest import EngineManifest
from tests.support.serving import request
from tests.support.tiny_engine import tiny_manifest

FULL = LayerGroup(layers=(0, 2), kv_heads=2, head_dim=4, dtype=DType.FLOAT32)
SLIDING = LayerGroup(layers=(1,), kv_heads=2, head_dim=4, dtype=DType.FLOAT32, window=4)
SPEC = KVCacheSpec((FULL, SLIDING), Layout.PAGED, page_size=4, max_len=32)
PAGES = [PageId(3), PageId(1), PageId(4)]


def engine(spec: KVCacheSpec) -> EngineManifest:
    return tiny_manifest(spec, ["decode=1x1", "prefill=1x4"], [])


def view(norms: np.ndarray, positions: list[int] | None = None) -> KVView:
    """A sequence whose keys in layer l, head h have the norms `norms[l, h]`."""
    length = norms.shape[-1]
    pool = KVPool(SPEC, num_pages=6)
    for ordinal in range(length):
        for layer in range(3):
            rows = pool.by_page(layer)[PAGES[ordinal // 4], K, :, ordinal % 4]
            rows[:, ordinal % 3] = torch.tensor(norms[layer, :, ordinal])
    sequence = Sequence(request([1] * length, 1), 0, 0)
    sequence.hold(PAGES)
    survivors = np.asarray([positions or range(length)], dtype=np.int32)
    sequence.computed = int(survivors.max()) + 1
    sequence.entries = EntryMap(survivors, at=sequence.computed)
    return KVView(sequence, pool)


def test_a_view_shows_lengths_positions_and_the_keys_of_full_layers() -> None:
    norms = np.arange(1.0, 31.0).reshape(3, 2, 5)
    seen = view(norms, positions=[0, 1, 7, 8, 9])
    assert (seen.length, seen.logical_length, seen.positions.tolist()) == (5, 10, [[0, 1, 7, 8, 9]])
    assert [layer.tolist() for layer in seen.key_norms()] == [norms[0].tolist(), norms[2].tolist()]


def test_sink_recent_keeps_the_newest_positions() -> None:
    seen = view(np.ones((3, 2, 5)), positions=[0, 9, 7, 1, 8])
    scores = SinkRecent().score(seen).numpy()
    assert (scores.dtype, scores.tolist()) == (np.float32, [[0, 9, 7, 1, 8]])
    assert keep_best(scores, seen.positions, budget=3, sinks=1).kept.tolist() == [[0, 1, 4]]


def test_knorm_keeps_the_shortest_keys() -> None:
    norms = np.broadcast_to(np.array([5.0, 1.0, 4.0, 2.0, 3.0, 6.0]), (3, 2, 6))
    seen = view(norms)
    scores = KNorm().score(seen).numpy()
    assert scores.dtype == np.float32
    assert keep_best(scores, seen.positions, budget=3, sinks=0).kept.tolist() == [[1, 3, 4]]


def test_heads_that_do_not_share_keep_the_shortest_of_their_own() -> None:
    """In layers that see everything, layers ascending and heads inside a layer; shared by the layers where rows are by head."""
    norms = np.full((3, 2, 4), 5.0)
    for row, (layer, head) in enumerate([(0, 0), (0, 1), (2, 0), (2, 1)]):
        norms[layer, head, row] = 1.0
    norms[2, 1, 0] = 0.5
    per_layer_head = KNorm(RowMode.PER_LAYER_HEAD).score(view(norms)).numpy()
    assert per_layer_head.shape == (4, 4)
    assert per_layer_head.argmax(axis=1).tolist() == [0, 1, 2, 0]
    per_head = KNorm(RowMode.PER_HEAD).score(view(norms)).numpy()
    assert per_head.shape == (2, 4)
    assert per_head[0].argsort().tolist()[2:] == [0, 2]
    assert per_head[1].argmax() == 0
    assert KNorm().score(view(norms)).numpy().shape == (1, 4)


def test_no_head_outvotes_another_by_having_longer_keys() -> None:
    """Three of four heads prefer ordinal 0; the fourth, a hundred times longer, prefers ordinal 2."""
    norms = np.ones((3, 2, 3))
    norms[[0, 0, 2], [0, 1, 0]] = [1.0, 2.0, 2.0]
    norms[2, 1] = [200.0, 200.0, 100.0]
    assert KNorm().score(view(norms)).numpy().argmax() == 0


def test_sliding_layers_have_no_vote() -> None:
    """Their old cells are stale."""
    norms = np.ones((3, 2, 6))
    reference = KNorm().score(view(norms)).numpy()
    norms[1] = np.linspace(1, 9, 6)
    assert KNorm().score(view(norms)).numpy().tolist() == reference.tolist()


def test_keys_of_nothing_but_zeros_have_a_score() -> None:
    assert np.isfinite(KNorm().score(view(np.zeros((3, 2, 4)))).numpy()).all()


@pytest.mark.parametrize("name", ["snapkv", "", "sink_recent "])
def test_an_unknown_policy_is_refused_with_the_known_ones(name: str) -> None:
    if not name:
        with pytest.raises(FieldOutOfRange):
            CompactionParams(name, 8, 4)
        return
    with pytest.raises(FieldOutOfRange, match="knorm, knorm_per_head, knorm_per_layer_head, sink_recent"):
        check_policy(CompactionParams(name, 8, 4), engine(SPEC))


def test_an_engine_whose_positions_are_its_cells_is_not_compacted() -> None:
    with pytest.raises(FieldOutOfRange, match="takes positions for cells"):
        check_policy(CompactionParams("sink_recent", 8, 4), replace(engine(SPEC), bindings=()))


def test_a_policy_that_needs_keys_of_full_layers_is_refused_where_there_are_none() -> None:
    sliding_only = KVCacheSpec((LayerGroup((0,), 2, 4, DType.FLOAT32, window=4),), Layout.PAGED, 4, 32)
    with pytest.raises(FieldOutOfRange, match="Use sink_recent"):
        check_policy(CompactionParams("knorm", 8, 4), engine(sliding_only))
    check_policy(CompactionParams("sink_recent", 8, 4), engine(sliding_only))
    for name in POLICIES:
        check_policy(CompactionParams(name, 8, 4), engine(SPEC))


def test_rows_by_head_are_refused_where_layers_have_different_heads() -> None:
    mixed = KVCacheSpec((LayerGroup((0,), 2, 4, DType.FLOAT32), LayerGroup((1,), 3, 4, DType.FLOAT32)), Layout.PAGED, 4, 32)
    with pytest.raises(FieldOutOfRange, match=r"this model's have \[2, 3\]"):
        check_policy(CompactionParams("knorm_per_head", 8, 4), engine(mixed))
    check_policy(CompactionParams("knorm_per_layer_head", 8, 4), engine(mixed))


def test_hole_filling_is_refused_where_a_window_sees_the_order_of_cells() -> None:
    holes = CompactionParams("sink_recent", 8, 4, mode=Mode.HOLE_FILLING)
    full = KVCacheSpec((FULL, LayerGroup((1,), 2, 4, DType.FLOAT32)), Layout.PAGED, 4, 32)
    check_policy(holes, engine(full))
    with pytest.raises(FieldOutOfRange, match=r"layers with windows of \[4\] are masked. Use ordered") as refusal:
        check_policy(holes, engine(SPEC))
    assert refusal.value.field == "kv.policy.mode"
    with pytest.raises(FieldOutOfRange, match=r"windows of \[4\]"):
        check_policy(holes, engine(full), draft=SPEC)


def test_a_draft_follows_one_decision_for_all_heads() -> None:
    full = KVCacheSpec((FULL, LayerGroup((1,), 2, 4, DType.FLOAT32)), Layout.PAGED, 4, 32)
    with pytest.raises(FieldOutOfRange, match="a draft's cache follows one decision"):
        check_policy(CompactionParams("knorm_per_head", 8, 4), engine(full), draft=full)
    check_policy(CompactionParams("knorm", 8, 4, mode=Mode.HOLE_FILLING), engine(full), draft=full)

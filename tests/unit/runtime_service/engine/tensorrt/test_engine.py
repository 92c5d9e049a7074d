"""Batches as launches of a plan, and logits that the next launch overwrites; the launcher here is a tiny decoder on the CPU."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

from runtime_service.engine.engine import EngineInputs
from runtime_service.engine.tensorrt.engine import TensorRTEngine
from runtime_service.engine.tensorrt.launch import Launch, input_layout
from runtime_service.engine.weights import ModelWeights
from runtime_service.kv.pool import KVPool
from shared.errors import InternalError
from shared.kv_spec import Layout
from tests.support.tiny_engine import VOCAB, TinyEngine
from tests.support.tiny_launcher import TinyLauncher

PROFILES = ("decode=8x1", "prefill=2x16")


def planned(layout: Layout = Layout.LINEAR) -> tuple[TensorRTEngine, TinyLauncher]:
    launcher = TinyLauncher(TinyEngine(layout=layout, profiles=PROFILES))
    return TensorRTEngine(launcher.engine.manifest, launcher, ModelWeights({}), ExitStack()), launcher


def step(table: list[list[int]], tokens: list[int]) -> EngineInputs:
    """The first token of every row."""
    ids, zeros = torch.tensor(tokens, dtype=torch.int32)[:, None], torch.zeros(len(tokens), dtype=torch.int32)
    return EngineInputs("decode", ids, torch.zeros_like(ids), zeros, zeros, torch.tensor(table, dtype=torch.int32))


@pytest.mark.parametrize(
    ("slots", "launches"),
    [([6, 2, 0, 5, 3], [(2, 2), (5, 2)]), ([4, 2, 3], [(2, 3)]), ([2, 3, 4], [(2, 3)]), ([0, 1], [(1, 1)])],
    ids=["apart", "neighbours in another order", "neighbours", "padding before"],
)
def test_logits_come_in_the_order_of_the_batch(slots: list[int], launches: list[tuple[int, int]]) -> None:
    engine, launcher = planned()
    pools = [KVPool(engine.manifest.cache, 9) for _ in "ab"]
    inputs = step([[slot] for slot in slots], [10 + row for row in range(len(slots))])
    got = engine.run(inputs, pools[0])
    assert [(launch.first_slot, launch.rows) for launch in launcher.launches] == launches
    wanted = launcher.engine.run(inputs, pools[1])
    wanted[[row for row, slot in enumerate(slots) if slot == 0]] = 0.0  # nothing runs for padding
    assert torch.equal(got, wanted)
    assert all(torch.equal(a[:, 1:], b[:, 1:]) for a, b in zip(pools[0].tensors, pools[1].tensors, strict=True))


@pytest.mark.parametrize("layout", Layout)
def test_a_step_of_padding_launches_nothing(layout: Layout) -> None:
    engine, launcher = planned(layout)
    assert engine.run(step([[0], [0]], [0, 0]), KVPool(engine.manifest.cache, 4)).tolist() == [[0.0] * VOCAB] * 2
    assert launcher.launches == []


def test_a_closed_engine_does_not_run() -> None:
    engine, launcher = planned()
    engine.close()
    engine.close()
    assert launcher.closed
    with pytest.raises(InternalError, match="closed"):
        engine.run(step([[1]], [3]), KVPool(engine.manifest.cache, 4))


def test_a_launch_on_pages_takes_the_whole_block_table_and_a_row_for_every_page() -> None:
    _, launcher = planned(Layout.PAGED)
    manifest = launcher.engine.manifest
    places = input_layout(Launch(1, 2, 16, num_packed=40), manifest, num_pages=50).places
    assert {name: shape for name, (_, shape) in places.items()} == {
        "input_ids": (2, 16),
        "position_ids": (2, 16),
        "write_start": (2,),
        "last_index": (2,),
        "block_table": (2, manifest.cache.max_pages),
        "packed_order": (40,),
        "packed_ends": (101,),
        "packed_offsets": (100,),
    }

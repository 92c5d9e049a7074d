"""A plan that does not do what it says is refused when it is loaded; the launcher here is a tiny decoder on the CPU."""

from __future__ import annotations

import pytest
from torch import Tensor

from runtime_service.engine.tensorrt.probe import find_plan_faults
from runtime_service.engine.weights import ModelWeights
from runtime_service.kv.pool import K, KVPool
from shared.kv_spec import Layout
from tests.support.tiny_engine import TinyEngine
from tests.support.tiny_launcher import Misdeed, TinyLauncher

PROFILES = ("decode=4x1", "prefill=1x8")


def nothing(pool: KVPool, starts: Tensor, slot: int) -> None:
    """A plan as it should be."""


def one_cell_before(pool: KVPool, starts: Tensor, slot: int) -> None:
    pool.tensors[1][K, slot, :, int(starts[0]) - 1] = 7.0


def in_the_next_slot(pool: KVPool, starts: Tensor, slot: int) -> None:
    pool.tensors[0][K, slot - 1, 0, int(starts[0])] = 7.0


def undone(pool: KVPool, starts: Tensor, slot: int) -> None:
    """As a copy would: the caller's cache stays as it was."""
    pool.tensors[0][:, slot, :, int(starts[0])] = pool.tensors[0][:, slot, :, int(starts[0]) - 1]


def find(misdeed: Misdeed) -> list[str]:
    launcher = TinyLauncher(TinyEngine(layout=Layout.LINEAR, max_len=32, profiles=PROFILES), misdeed)
    faults = find_plan_faults(launcher.engine.manifest, launcher, ModelWeights({}))
    assert launcher.closed, "contexts of the probe's pools must not stay"
    return faults


def test_a_plan_that_writes_in_place_and_agrees_with_itself_passes() -> None:
    assert find(nothing) == []


@pytest.mark.parametrize(
    ("misdeed", "told"),
    [
        (one_cell_before, "layer 1 writes cells outside"),
        (in_the_next_slot, "layer 0 writes cells outside"),
        (undone, "one by one disagree"),
    ],
)
def test_what_a_plan_does_wrong_is_said(misdeed: Misdeed, told: str) -> None:
    assert any(told in fault for fault in find(misdeed))

"""Rounds whose moves a device reaches late: the same pages, maps and bytes as where everything is done at once."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from shared.kernels.compaction.modes import Mode, RowMode
from tests.support.compaction import twins


class Late:
    """A fence that passes by chance, or when somebody waits for it."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._passed = False

    def passed(self) -> bool:
        self._passed = self._passed or bool(self._rng.random() < 0.3)
        return self._passed

    def wait(self) -> None:
        self._passed = True


@pytest.mark.parametrize(("mode", "drafted"), list(itertools.product(Mode, (False, True))))
def test_pages_are_handed_out_in_the_same_order(mode: Mode, drafted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = twins.specs(mode)["full"]
    policy = twins.policy_for(RowMode.UNION, spec)
    assert policy is not None
    at_once, late = (twins.Twin(torch.device("cpu"), spec, policy, mode, drafted) for _ in range(2))
    fences: list[Late] = []

    def fence() -> Late:
        fences.append(Late(np.random.default_rng(len(fences))))
        return fences[-1]

    for pool in late.pools:
        monkeypatch.setattr(pool, "fence", fence)
    rng = np.random.default_rng(6)
    for _ in range(300):
        twins.step(rng, [at_once, late])
        if at_once.due():
            for twin in (at_once, late):
                twin.compactor.run(twin.due())
            while fences:
                fences.pop().wait()
            assert twins.differing([at_once, late]) == 0
    assert at_once.compactor.evidence.rounds > 10

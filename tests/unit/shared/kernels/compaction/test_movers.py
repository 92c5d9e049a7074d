"""Every mover equals the reference on every catalogued round, over every byte of every pool."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from shared.errors import BackendUnavailable
from shared.kernels.build import find_compiler
from shared.kernels.compaction import cpu, movers
from shared.kernels.compaction.inputs import RequestRound
from shared.kernels.compaction.modes import Mode
from shared.kernels.compaction.movers import Mover
from shared.kernels.compaction.params import compact
from tests.support.compaction import catalogue
from tests.support.compaction.case import Case, GroupCase, Rig, differing_bytes, run
from tests.support.compaction.far import differing_far_cells

CPU = torch.device("cpu")
CASES = catalogue.catalogue()


@cache
def expected_bytes(name: str) -> list[torch.Tensor]:
    return run(CASES[name](), Mover.REFERENCE)


@pytest.fixture(params=["compiled", "portable"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The two forms of the CPU mover."""
    if request.param == "portable":
        monkeypatch.setattr(cpu, "load_library", lambda *_: None)
    elif find_compiler() is None:
        pytest.skip("no C++ compiler on this host")
    return str(request.param)


@pytest.mark.parametrize("name", CASES)
def test_catalogue(name: str, form: str) -> None:
    """The compiled form runs behind the value check, which must find no fault in sound rounds and let them move."""
    check_values = form == "compiled" and "unmapped" not in name
    assert differing_bytes(run(CASES[name](), Mover.CPU, check_values=check_values), expected_bytes(name)) == 0


@pytest.mark.parametrize("mode", Mode)
def test_a_bound_geometry_serves_changing_rounds(mode: Mode, form: str) -> None:
    """Decisions, tables and lengths change under one set of params; a page freed by round 1 is request 1's in round 2."""
    table = np.array([[1, 2, 3], [4, 5, -1]], dtype=np.int32)
    case = Case(4, (GroupCase(table, 7, layers=(0, 1), mode=mode),), (), keep_capacity=8, tail_capacity=1)
    rigs = [Rig(case, CPU), Rig(case, CPU)]
    built = [rig.build(mover, check_values=True) for rig, mover in zip(rigs, (Mover.CPU, Mover.REFERENCE), strict=True)]
    rounds = [
        ([catalogue.union([0, 3, 8, 11], valid_len=12)], table),
        ([catalogue.union([1, 3], valid_len=4), catalogue.union([0, 2, 5, 9], valid_len=11, tail=1)], [[1, -1, -1], [4, 5, 3]]),
        ([catalogue.union([0, 1], valid_len=2), catalogue.union([1, 2, 3, 4], base=1, valid_len=5)], [[1, 2, -1], [4, 5, 3]]),
    ]
    for requests, pages in rounds:
        for rig, params in zip(rigs, built, strict=True):
            rig.layout.groups[0].block_table.copy_(torch.tensor(np.array(pages)))
            compact(params, rig.inputs.stage(requests))
            assert params.fault() is None
        assert differing_bytes(rigs[0].storages, rigs[1].storages) == 0


@pytest.mark.parametrize("mode", Mode)
def test_offsets_past_2_31(form: str, mode: Mode) -> None:
    assert differing_far_cells(Mover.CPU, CPU, mode) == 0


def test_only_the_active_requests_move() -> None:
    """Rows past request_count are not touched even where their offsets say so."""
    case = catalogue.dense(requests=(catalogue.union([3, 9]), catalogue.union([1, 20])))
    rigs = [Rig(case, CPU) for _ in range(2)]
    for rig, requests in zip(rigs, (case.requests, case.requests[:1]), strict=True):
        rig.inputs.stage(requests)
        compact(rig.build(Mover.CPU), 1)
    assert differing_bytes(rigs[0].storages, rigs[1].storages) == 0


@pytest.mark.parametrize("count", [-1, 3])
def test_request_count_is_checked(count: int) -> None:
    case = catalogue.dense()
    rig = Rig(case, CPU)
    params = rig.build(Mover.CPU)
    rig.inputs.stage(case.requests)
    with pytest.raises(ValueError, match=rf"request_count: expected 0\.\.2, got {count}"):
        compact(params, count)
    assert differing_bytes(rig.storages, Rig(case, CPU).storages) == 0


def test_default_mover_is_the_devices() -> None:
    assert movers.choose(None, CPU) is Mover.CPU
    assert movers.choose(None, torch.device("cuda", 0)) is Mover.TRITON
    assert movers.choose(Mover.REFERENCE, torch.device("cuda", 0)) is Mover.REFERENCE


def test_mover_that_cannot_serve_the_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="mover: expected triton or reference for tensors on cuda:0, got cpu"):
        movers.choose(Mover.CPU, torch.device("cuda", 0))
    with pytest.raises(ValueError, match="mover: expected cpu or reference for tensors on cpu, got triton"):
        movers.choose(Mover.TRITON, CPU)


def test_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(movers.importlib.util, "find_spec", lambda _: None)
    rig = Rig(catalogue.dense(requests=(RequestRound(np.zeros((1, 1), dtype=np.int32), 0, 1),)), CPU)
    with pytest.raises(BackendUnavailable, match="needs triton"):
        movers.bind(Mover.TRITON, (), rig.inputs, None)

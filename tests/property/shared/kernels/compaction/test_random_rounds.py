"""Random rounds: every mover equals the reference over every byte, and the reference equals indexing out of place.

The long form is `python -m tests.property.compaction_fuzz --rounds 20000`; Triton's kernels run under the interpreter in
tests/unit/shared/kernels/compaction/test_interpreter.py.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.kernels.compaction import cpu
from shared.kernels.compaction.inputs import RequestRound
from shared.kernels.compaction.modes import Mode, RowMode
from shared.kernels.compaction.movers import Mover
from shared.kernels.compaction.moves import hole_filling_moves, ordered_moves, scrub_end
from tests.support.compaction.case import Case, GroupCase, Rig, choose_kept, differing_bytes, run, shuffled_tables
from tests.support.compaction.generate import generate
from tests.support.compaction.oracle import expected_after

SUITE = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


@st.composite
def cases(draw: Callable[[st.SearchStrategy[object]], object]) -> Case:
    seed = draw(st.integers(0, 2**32 - 1))
    assert isinstance(seed, int)
    return generate(lambda options: draw(st.sampled_from(list(options))), np.random.default_rng(seed))


@pytest.mark.parametrize("form", ["compiled", "portable"])
@SUITE
@given(case=cases())
def test_cpu_mover_equals_the_reference(form: str, case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if form == "portable":
            patch.setattr(cpu, "load_library", lambda *_: None)
        got = run(case, Mover.CPU)
    assert differing_bytes(got, run(case, Mover.REFERENCE)) == 0


@SUITE
@given(seed=st.integers(0, 2**32 - 1), mode=st.sampled_from(Mode), row_mode=st.sampled_from(RowMode), tail=st.integers(0, 3))
def test_reference_equals_indexing_out_of_place(seed: int, mode: Mode, row_mode: RowMode, tail: int) -> None:
    rng = np.random.default_rng(seed)
    rows = {RowMode.UNION: 1, RowMode.PER_HEAD: 2, RowMode.PER_LAYER_HEAD: 4}[row_mode]
    requests = []
    for _ in range(2):
        valid_len, base = int(rng.integers(10, 30)), int(rng.integers(0, 10))
        keep = int(rng.integers(0, valid_len - base + 1))
        requests.append(RequestRound(choose_kept(rng, rows, keep, base, valid_len), base, valid_len, tail))
    group = GroupCase(shuffled_tables(rng, 2, 7, 16), 16, layers=(0, 1), head_dim=4, mode=mode)
    case = Case(5, (group,), tuple(requests), row_mode=row_mode, keep_capacity=30)
    assert differing_bytes(run(case, Mover.REFERENCE), expected_after(Rig(case, torch.device("cpu")))) == 0


@st.composite
def rows(draw: Callable[[st.SearchStrategy[object]], object]) -> tuple[np.ndarray, int, int, int, int]:
    """(kept, base, valid_len, tail, page_size) of one decision row."""
    base, span, tail = (int(draw(st.integers(0, high))) for high in (9, 40, 6))  # type: ignore[call-overload]  # drawn ints
    kept = draw(st.sets(st.integers(base, base + span - 1))) if span else set()
    assert isinstance(kept, set)
    page_size = int(draw(st.integers(1, 12)))  # type: ignore[call-overload]  # a drawn int
    return np.array(sorted(kept), dtype=np.int32), base, base + span, tail, page_size


@given(row=rows(), hole_filling=st.booleans(), scrub=st.booleans(), tile=st.integers(1, 7))
def test_the_ordered_part_is_safe_in_any_tiling_with_any_prefetch(
    row: tuple[np.ndarray, int, int, int, int], hole_filling: bool, scrub: bool, tile: int
) -> None:
    """The contract the kernels lean on: a store never clobbers the source of a later move, so any later load may come early or
    late; and what is not ordered shares no cell with anything."""
    kept, base, valid_len, tail, page_size = row
    scrub_to = scrub_end(base + len(kept) + tail, valid_len + tail, page_size) if scrub else 0
    build = hole_filling_moves if hole_filling else ordered_moves
    moves = build(kept, base, valid_len, tail, scrub_to)
    ordered = list(zip(moves.src.tolist(), moves.dst.tolist(), strict=True))[: moves.ordered]
    free = list(zip(moves.src.tolist(), moves.dst.tolist(), strict=True))[moves.ordered :]
    for i, (_, dst) in enumerate(ordered):
        assert all(dst != src for src, _ in ordered[i + 1 :])
    free_cells = [cell for move in free for cell in move]
    assert len(set(free_cells)) == len(free_cells)
    assert not set(free_cells) & {cell for move in ordered for cell in move}

    cells = {ordinal: ordinal for ordinal in range(valid_len + tail + page_size)}
    for low in range(0, len(ordered), tile):  # tiled in place, loads of a tile before its stores
        loaded = [(0 if src < 0 else cells[src], dst) for src, dst in ordered[low : low + tile]]
        cells.update({dst: value for value, dst in loaded})
    for src, dst in free:
        cells[dst] = cells[src]
    end = base + len(kept)
    survivors = [cells[ordinal] for ordinal in range(base, end)]
    assert (sorted(survivors) if hole_filling else survivors) == kept.tolist()
    assert [cells[end + i] for i in range(tail)] == list(range(valid_len, valid_len + tail))
    assert [cells[ordinal] for ordinal in range(base)] == list(range(base))

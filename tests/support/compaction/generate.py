"""Random rounds. One generator serves hypothesis and the long fuzz: both only decide what `choose` returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from shared.kernels.compaction.inputs import RequestRound
from shared.kernels.compaction.layout import Family
from shared.kernels.compaction.modes import Mode, RowMode
from shared.kv_spec import DType, Layout
from tests.support.compaction.case import Case, GroupCase, choose_kept

Choose = Callable[[Sequence[Any]], Any]


def generate(choose: Choose, rng: np.random.Generator) -> Case:
    """A valid round: `choose` picks its shape, `rng` its ordinals and pages."""
    layout = choose(list(Layout))
    page_size = choose([1, 2, 3, 4, 7, 8, 16]) if layout is Layout.PAGED else choose([24, 40, 64])
    max_pages = choose([1, 2, 5, 9]) if layout is Layout.PAGED else 1
    row_mode = choose(list(RowMode))
    batch = choose([1, 2, 3, 4])
    count = choose(range(batch + 1))
    tail_capacity = choose([0, 1, 3, 8])
    window = choose([None, None, 1, 3, 8])
    kv_heads = choose([1, 2, 3])
    layers = choose([1, 2, 3])
    lengths = [_lengths(choose, max_pages * page_size, tail_capacity, window or 0) for _ in range(count)]

    groups = [_group(choose, rng, batch, max_pages, tuple(range(layers)), kv_heads, choose(list(Mode)))]
    rows = {RowMode.UNION: 1, RowMode.PER_HEAD: kv_heads, RowMode.PER_LAYER_HEAD: layers * kv_heads}[row_mode]
    if choose([False, True]):  # a second full-attention geometry
        heads = choose([kv_heads, 1, 4]) if row_mode is not RowMode.PER_HEAD else kv_heads
        groups.append(_group(choose, rng, batch, max_pages, (layers,), heads, choose(list(Mode))))
        rows += heads if row_mode is RowMode.PER_LAYER_HEAD else 0
    if window is not None:
        family, table_of = choose([(Family.MASKED_WINDOW, window), (Family.WINDOW_SIZED, None)])
        groups.append(_group(choose, rng, batch, max_pages, (layers + 1,), choose([1, 2]), Mode.ORDERED, family, table_of))
    draft = row_mode is RowMode.UNION and choose([False, False, True])

    requests = tuple(
        RequestRound(choose_kept(rng, rows, keep, base, valid_len), base, valid_len, tail, draft_tail)
        for keep, base, valid_len, tail, draft_tail in lengths
    )
    if count > 1 and choose([False, False, True]):
        first, second = choose([(0, 1), (1, 0), (0, count - 1)])
        common = min(lengths[first][1], lengths[second][1]) // page_size
        groups = [_sharing(group, first, second, common) for group in groups]
    return Case(
        page_size=page_size,
        groups=tuple(groups),
        requests=requests,
        layout=layout,
        row_mode=row_mode,
        keep_capacity=max([window or 1, *(keep for keep, *_ in lengths)]) + choose([0, 5]),
        tail_capacity=tail_capacity,
        scrub=choose([False, True]),
        draft=(_group(choose, rng, batch, max_pages, (0, 1), choose([1, 4]), choose(list(Mode))),) if draft else (),
    )


def _lengths(choose: Choose, room: int, tail_capacity: int, window: int) -> tuple[int, int, int, int, int]:
    """(keep, base, valid_len, tail, draft_tail) of one request in `room` cells."""
    tail, draft_tail = choose(range(min(tail_capacity, room - 1) + 1)), choose(range(min(tail_capacity, room - 1) + 1))
    valid_len = choose(range(room - max(tail, draft_tail) + 1))
    if valid_len < window:
        return 0, 0, 0, 0, 0  # too short to be compacted: no moves
    base = choose(range(valid_len - window + 1))
    keep = choose(range(window, valid_len - base + 1))
    return keep, base, valid_len, tail, draft_tail


def _sharing(group: GroupCase, first: int, second: int, common: int) -> GroupCase:
    """`second` reads the prefix pages of `first`: they end before either one's base, so that neither writes to them."""
    table = group.table.copy()
    table[second, :common] = table[first, :common]
    return replace(group, table=table)


def _group(
    choose: Choose,
    rng: np.random.Generator,
    batch: int,
    max_pages: int,
    layers: tuple[int, ...],
    kv_heads: int,
    mode: Mode,
    family: Family = Family.FULL,
    window: int | None = None,
) -> GroupCase:
    spare = choose([0, 2])
    num_pages = batch * max_pages + 1 + spare
    table = (rng.permutation(num_pages - 1)[: batch * max_pages] + 1).astype(np.int32).reshape(batch, max_pages)
    if family is Family.WINDOW_SIZED or choose([False] * 7 + [True]):  # holes in the table: moves through them come to nothing
        table[rng.random(table.shape) < 0.3] = -1
    return GroupCase(
        table=table,
        num_pages=num_pages,
        layers=layers,
        kv_heads=kv_heads,
        head_dim=choose([1, 3, 8, 20, 32]),
        dtype=choose(list(DType)),
        family=family,
        window=window,
        mode=mode,
        slack=choose([(0, 0, 0, 0), (5, 0, 0, 0), (8, 16, 4, 12)]),
    )

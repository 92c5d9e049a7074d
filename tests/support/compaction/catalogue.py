"""Named rounds: the counterparts of the seed's tests with its shapes, and the shapes that broke systems like ours.

Small enough for the reference and for Triton's interpreter; the unit tests and the H200 script run every one on every mover.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
from numpy.typing import NDArray

from shared.kernels.compaction.inputs import RequestRound
from shared.kernels.compaction.layout import Family
from shared.kernels.compaction.modes import Mode, RowMode
from shared.kv_spec import DType, Layout
from tests.support.compaction.case import Case, GroupCase, choose_kept, shuffled_tables


def catalogue() -> dict[str, Callable[[], Case]]:
    """Name -> builder."""
    cases: dict[str, Callable[[], Case]] = {
        "seed masked window and tail": seed_masked_window,
        "seed draft under the target's decision": seed_draft,
        "empty round": lambda: dense(requests=()),
        "fewer requests than rows": fewer_requests,
        "no moves in one request": lambda: dense(requests=(union([0, 2, 5]), nothing(), union([1, 4, 30], valid_len=40))),
        "keep everything": lambda: dense(requests=(union(range(40), valid_len=40), union(range(40), valid_len=40, tail=2))),
        "keep only the last": lambda: dense(requests=(union([39], valid_len=40), union([39], base=7, valid_len=40))),
        "keep nothing but a tail": lambda: dense(requests=(union([], base=3, valid_len=20, tail=3),)),
        "keep over 256": keep_over_256,
        "long identity prefix": lambda: dense(requests=(union([*range(30), 35, 36, 50], valid_len=60, tail=2),)),
        "ragged tails": lambda: dense(requests=tuple(union([2, 9, 17, 18], valid_len=30, tail=tail) for tail in (0, 1, 2, 3, 4))),
        "tail longer than the eviction": lambda: dense(requests=(union([*range(10), 11, 12], valid_len=13, tail=4),)),
        "pages unmapped": pages_unmapped,
        "one shifted row, tile by tile": lambda: shift(900, 1),
        "BR-051 1500 rows by 600": lambda: shift(1500, 600),
        "BR-051 6000 rows by 600": lambda: shift(6000, 600),
        "BR-051 6000 rows by 1": lambda: shift(6000, 1),
        "BR-065 padded page stride": padded_pages,
        "window-sized layers": window_sized,
        "linear slots": linear_slots,
        "layers interleaved in one page": lambda: dense(layers=(0, 3), slack=(64, 0, 0, 0)),
    }
    for row_mode in RowMode:
        cases[f"seed exact bytes and tail, {row_mode}"] = lambda row_mode=row_mode: seed_exact_bytes(row_mode)
    for base in (0, 2):
        cases[f"seed layers at base {base}"] = lambda base=base: seed_layers(base)
    for head_dim, page_size in product((64, 128), (32, 128)):
        cases[f"seed geometry {head_dim}x{page_size}"] = lambda h=head_dim, p=page_size: seed_geometry(h, p, RowMode.PER_HEAD)
    cases["seed geometry 64x32, per layer"] = lambda: seed_geometry(64, 32, RowMode.PER_LAYER_HEAD)
    for dtype, head_dim in zip([*DType, *DType], (80, 96, 32, 512, 64, 256, 192, 128, 96, 80, 33, 17), strict=True):
        cases[f"{dtype} head_dim {head_dim}"] = lambda d=dtype, h=head_dim: dense(dtype=d, head_dim=h)
    for page_size in (1, 3, 16, 64, 100, 1024):
        cases[f"pages of {page_size}"] = lambda p=page_size: dense(page_size=p)
    for name in ("seed exact bytes and tail, per_layer_head", "ragged tails", "tail longer than the eviction", "linear slots"):
        cases[f"{name}, scrubbed"] = lambda build=cases[name]: scrubbed(build())
    ordered_only = {"seed masked window and tail"}
    cases |= {
        f"{name}, hole filling": lambda build=build: build().with_mode(Mode.HOLE_FILLING)
        for name, build in cases.items()
        if name not in ordered_only
    }
    return cases


def union(kept: range | list[int], *, base: int = 0, valid_len: int = 40, tail: int = 0) -> RequestRound:
    """A request with one decision row."""
    return RequestRound(np.array([list(kept)], dtype=np.int32), base, valid_len, tail)


def nothing(rows: int = 1) -> RequestRound:
    """A request without moves."""
    return RequestRound(np.zeros((rows, 0), dtype=np.int32), 0, 0)


def scrubbed(case: Case) -> Case:
    return Case(**{**vars(case), "scrub": True})


def tables(batch: int, tokens: int, page_size: int, seed: int = 0) -> tuple[NDArray[np.int32], int]:
    """Shuffled tables for `tokens` entries each, and a pool size that leaves two pages to nobody."""
    max_pages = -(-tokens // page_size)
    num_pages = batch * max_pages + 3
    return shuffled_tables(np.random.default_rng(seed), batch, max_pages, num_pages), num_pages


def dense(
    requests: tuple[RequestRound, ...] | None = None,
    *,
    page_size: int = 8,
    layers: tuple[int, ...] = (0, 1),
    head_dim: int = 16,
    dtype: DType = DType.BFLOAT16,
    slack: tuple[int, int, int, int] = (0, 0, 0, 0),
) -> Case:
    """Full-attention layers of one geometry; by default two requests that keep a random half behind a short prompt."""
    if requests is None:
        rng = np.random.default_rng(1)
        requests = tuple(RequestRound(choose_kept(rng, 1, 30, base, 63), base, 63, tail) for base, tail in ((2, 1), (0, 3)))
    table, num_pages = tables(max(len(requests), 1), 72, page_size)
    group = GroupCase(table, num_pages, layers=layers, head_dim=head_dim, dtype=dtype, slack=slack)
    return Case(page_size, (group,), requests, keep_capacity=max([1, *(request.kept.shape[1] for request in requests)]))


def seed_exact_bytes(row_mode: RowMode) -> Case:
    """2 layers, pages of 32, head_dim 64; prompts 2 and 5, keep 4 of 80, tails 2 and 1; the kept lie on all three pages."""
    table, num_pages = tables(2, 96, 32)
    rows = {RowMode.UNION: 1, RowMode.PER_HEAD: 2, RowMode.PER_LAYER_HEAD: 4}[row_mode]
    rng = np.random.default_rng(2)
    group = GroupCase(table, num_pages, layers=(0, 1), head_dim=64)
    requests = []
    for base, tail in ((2, 2), (5, 1)):
        middle = np.sort(np.stack([rng.choice(np.arange(32, 64), 2, replace=False) for _ in range(rows)]), axis=1)
        kept = np.concatenate([rng.integers(base, 32, (rows, 1)), middle, rng.integers(64, 80, (rows, 1))], axis=1)
        requests.append(RequestRound(kept.astype(np.int32), base, 80, tail))
    return Case(32, (group,), tuple(requests), row_mode=row_mode)


def seed_masked_window() -> Case:
    """Layer 0 dense, layer 1 a masked window of 2 with tables of its own; valid 64 and 56, tails 2 and 1, prompt 2, keep 4."""
    (full, pages), (masked, masked_pages) = tables(2, 96, 32, seed=3), tables(2, 96, 32, seed=4)
    groups = (
        GroupCase(full, pages, layers=(0,), head_dim=64),
        GroupCase(masked, masked_pages, layers=(1,), head_dim=64, family=Family.MASKED_WINDOW, window=2),
    )
    requests = (union([3, 20, 40, 63], base=2, valid_len=64, tail=2), union([2, 31, 32, 50], base=2, valid_len=56, tail=1))
    return Case(32, groups, requests)


def seed_draft() -> Case:
    """Target with 2 heads, draft with 4 and tables of its own; target tails 2 and 1, draft tails 1 and 2."""
    (target, pages), (draft, draft_pages) = tables(2, 96, 32, seed=5), tables(2, 96, 32, seed=6)
    kept = np.array([[3, 20, 40, 63]], dtype=np.int32)
    requests = (RequestRound(kept, 2, 80, tail=2, draft_tail=1), RequestRound(kept + 7, 5, 80, tail=1, draft_tail=2))
    draft_group = GroupCase(draft, draft_pages, layers=(0,), kv_heads=4, head_dim=64)
    return Case(32, (GroupCase(target, pages, layers=(0, 1), head_dim=64),), requests, draft=(draft_group,))


def seed_layers(base: int) -> Case:
    """3 layers, per-head sources [2, 5, 8] and [3, 7, 10]."""
    table, num_pages = tables(1, 16, 4)
    request = RequestRound(np.array([[2, 5, 8], [3, 7, 10]], dtype=np.int32), base, 11)
    return Case(4, (GroupCase(table, num_pages, layers=(0, 1, 2)),), (request,), row_mode=RowMode.PER_HEAD)


def seed_geometry(head_dim: int, page_size: int, row_mode: RowMode) -> Case:
    """Moves (71, 0, 29), bases (3, 9, 17), five identity moves first, a decision buffer 37 wider than the round, and layers that
    lie in two groups, so that a layer's decision row is not its place in its group."""
    rng = np.random.default_rng(7)
    rows = 2 if row_mode is RowMode.PER_HEAD else 6
    requests = []
    for base, keep in ((3, 71), (9, 0), (17, 29)):
        identity = np.broadcast_to(np.arange(base, base + min(keep, 5)), (rows, min(keep, 5)))
        rest = choose_kept(rng, rows, max(keep - 5, 0), base + 6, 180)
        requests.append(RequestRound(np.concatenate([identity, rest], axis=1).astype(np.int32), base, 180))
    groups = tuple(
        GroupCase(*tables(3, 192, page_size, seed), layers=layers, head_dim=head_dim) for seed, layers in ((8, (0, 2)), (9, (1,)))
    )
    return Case(page_size, groups, tuple(requests), row_mode=row_mode, keep_capacity=71 + 37)


def fewer_requests() -> Case:
    """Two requests in tables of four rows."""
    table, num_pages = tables(4, 64, 8)
    return Case(8, (GroupCase(table, num_pages),), (union([1, 5, 30]), union([0, 20, 39], tail=1)), keep_capacity=9)


def keep_over_256() -> Case:
    """More moves than any block of lanes, per head."""
    rng = np.random.default_rng(10)
    table, num_pages = tables(2, 1400, 16)
    requests = tuple(RequestRound(choose_kept(rng, 2, keep, 4, 1390), 4, 1390, 3) for keep in (1100, 700))
    return Case(16, (GroupCase(table, num_pages, head_dim=8),), requests, row_mode=RowMode.PER_HEAD)


def pages_unmapped() -> Case:
    """Moves from and to pages that are not mapped come to nothing and fault nowhere."""
    case = dense()
    table = case.groups[0].table.copy()
    table[0, 1], table[1, 5], table[1, 6] = -1, -1, case.groups[0].num_pages + 1000
    return Case(**{**vars(case), "groups": (GroupCase(**{**vars(case.groups[0]), "table": table}),)})


def shift(rows: int, by: int) -> Case:
    """A block moved down over itself: every tile's destinations are sources of the tile before it, or of its own."""
    table, num_pages = tables(1, rows + by, 32)
    group = GroupCase(table, num_pages, kv_heads=1, head_dim=32)
    return Case(32, (group,), (union(range(by, by + rows), valid_len=rows + by),))


def padded_pages() -> Case:
    """Pages of 3 x 64 x 128 rounded up to 64 KiB, five of them: offsets come from strides."""
    table, num_pages = tables(1, 15, 3)
    slack = 65536 // 2 - 2 * 64 * 3 * 128 % (65536 // 2)
    group = GroupCase(table, num_pages, kv_heads=64, head_dim=128, slack=(slack, 0, 0, 0))
    return Case(3, (group,), (union([1, 4, 5, 9, 13], valid_len=15),))


def window_sized() -> Case:
    """Layers that store only their window take no part."""
    case = dense()
    table, num_pages = tables(2, 72, 8, seed=11)
    table[:, :6] = -1
    sized = GroupCase(table, num_pages, layers=(2,), family=Family.WINDOW_SIZED)
    return Case(**{**vars(case), "groups": (*case.groups, sized)})


def linear_slots() -> Case:
    """One slot a request."""
    rng = np.random.default_rng(12)
    group = GroupCase(np.array([[4], [1], [3]], dtype=np.int32), 5, layers=(0, 1), head_dim=24)
    requests = tuple(RequestRound(choose_kept(rng, 2, keep, 3, 90), 3, 90, 2) for keep in (40, 80, 10))
    return Case(96, (group,), requests, layout=Layout.LINEAR, row_mode=RowMode.PER_HEAD)

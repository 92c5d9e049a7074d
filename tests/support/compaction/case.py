"""One compaction round as data, built on any device and compared byte for byte with the specification.

Every 8 bytes of every allocation, padding included, hold a different pattern (a bijective mix of their index), so no two rows
are alike and a byte that moved anywhere it should not shows up in the whole-pool comparison. Needs torch and numpy only: the
H200 script uses it too.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from shared.kernels.compaction.inputs import RequestRound, RoundInputs
from shared.kernels.compaction.layout import CacheLayout, Family, PoolGroup
from shared.kernels.compaction.modes import Mode, RowMode
from shared.kernels.compaction.movers import Mover
from shared.kernels.compaction.params import CompactionParams, build_compaction_params, compact
from shared.kv_spec import DType, Layout

if TYPE_CHECKING:
    from shared.kernels.compaction.triton.mover import Tuning


@dataclass(frozen=True)
class GroupCase:
    """`table`: page ids `[batch, max_pages]`. `slack`: extra elements between neighbours along (page, kv, head, token)."""

    table: NDArray[np.int32]
    num_pages: int
    layers: tuple[int, ...] = (0,)
    kv_heads: int = 2
    head_dim: int = 16
    dtype: DType = DType.BFLOAT16
    family: Family = Family.FULL
    window: int | None = None
    mode: Mode = Mode.ORDERED
    slack: tuple[int, int, int, int] = (0, 0, 0, 0)


@dataclass(frozen=True)
class Case:
    page_size: int
    groups: tuple[GroupCase, ...]
    requests: tuple[RequestRound, ...]
    layout: Layout = Layout.PAGED
    row_mode: RowMode = RowMode.UNION
    keep_capacity: int = 0
    tail_capacity: int = 4
    scrub: bool = False
    draft: tuple[GroupCase, ...] = ()

    @property
    def request_count(self) -> int:
        return len(self.requests)

    def with_mode(self, mode: Mode) -> Case:
        """The same round with every full-attention group in `mode`."""
        changed = (replace(group, mode=mode) if group.family is Family.FULL else group for group in self.groups)
        return replace(self, groups=tuple(changed))


@dataclass
class Rig:
    """A case on a device. `storages`: every allocation behind a pool, as bytes."""

    case: Case
    device: torch.device
    storages: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.layout = self._cache(self.case.groups)
        self.draft = self._cache(self.case.draft) if self.case.draft else None
        keep_capacity = self.case.keep_capacity or max(request.kept.shape[1] for request in self.case.requests)
        self.inputs = RoundInputs.allocate(
            self.layout, row_mode=self.case.row_mode, keep_capacity=keep_capacity, tail_capacity=self.case.tail_capacity
        )

    def build(self, mover: Mover, check_values: bool = False, tuning: Tuning | None = None) -> CompactionParams:
        """`tuning`: of the Triton mover, in place of its default."""
        params = build_compaction_params(
            self.layout, self.inputs, draft=self.draft, scrub=self.case.scrub, check_values=check_values, mover=mover
        )
        if tuning is None:
            return params
        from shared.kernels.compaction.triton import (
            mover as triton_mover,
        )  # optional, and bound to the interpreter or not on import

        key = params.check.key if params.check is not None else None
        return replace(params, _launch=triton_mover.bind(params.groups, self.inputs, key, tuning))

    def _cache(self, groups: tuple[GroupCase, ...]) -> CacheLayout:
        bound = []
        for group in groups:
            # A wider buffer: rows of the table are not adjacent.
            wide = torch.full((group.table.shape[0], group.table.shape[1] + 3), -7, dtype=torch.int32, device=self.device)
            table = wide[:, : group.table.shape[1]]
            table.copy_(torch.from_numpy(group.table))
            pools = tuple(self._pool(group) for _ in group.layers)
            bound.append(PoolGroup(group.layers, pools, table, group.family, group.window, group.mode))
        return CacheLayout(self.case.layout, tuple(bound))

    def _pool(self, group: GroupCase) -> torch.Tensor:
        outer = [group.num_pages, 2] if self.case.layout is Layout.PAGED else [2, group.num_pages]
        shape = (*outer, group.kv_heads, self.case.page_size, group.head_dim)
        page_slack, kv_slack, head_slack, token_slack = group.slack
        slack = ((page_slack, kv_slack) if self.case.layout is Layout.PAGED else (kv_slack, page_slack)) + (head_slack, token_slack)
        strides = [1]
        for size, extra in zip(reversed(shape[1:]), reversed(slack), strict=True):
            strides.insert(0, strides[0] * size + extra)
        words = -(-strides[0] * shape[0] * group.dtype.itemsize // 8)
        storage = unique_words(words, salt=len(self.storages), device=self.device)
        self.storages.append(storage.view(torch.uint8))
        return storage.view(getattr(torch, group.dtype.value)).as_strided(shape, strides)


def unique_words(count: int, salt: int, device: torch.device) -> torch.Tensor:
    """int64 `[count]`, all different, also between salts below 2^16: each is an invertible mix of (salt, index)."""
    words = torch.arange(count, dtype=torch.int64, device=device) + (salt << 40)
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        words.bitwise_xor_(words >> shift & (1 << 64 - shift) - 1).mul_(factor)
    return words


def run(
    case: Case,
    mover: Mover,
    device: torch.device | str = "cpu",
    check_values: bool = False,
    tuning: Tuning | None = None,
) -> list[torch.Tensor]:
    """All bytes after the round. With `check_values` a fault of the inputs raises AssertionError."""
    rig = Rig(case, torch.device(device))
    params = rig.build(mover, check_values, tuning)
    compact(params, rig.inputs.stage(case.requests))
    assert params.fault() is None, str(params.fault())
    return rig.storages


_COMPARED_AT_ONCE = 1 << 30
"""Elements: a comparison of whole allocations must not need more memory than the card has."""


def differing_bytes(got: list[torch.Tensor], expected: list[torch.Tensor]) -> int:
    """Bytes that differ anywhere in any allocation."""
    assert [storage.shape for storage in got] == [storage.shape for storage in expected]
    return sum(
        int((one != other.to(one.device)).sum())
        for a, b in zip(got, expected, strict=True)
        for one, other in zip(a.view(-1).split(_COMPARED_AT_ONCE), b.view(-1).split(_COMPARED_AT_ONCE), strict=True)
    )


def shuffled_tables(rng: np.random.Generator, batch: int, max_pages: int, num_pages: int) -> NDArray[np.int32]:
    """Block tables `[batch, max_pages]` of pages 1.. (0 is the dump page), each in one place only."""
    return (rng.permutation(num_pages - 1)[: batch * max_pages] + 1).astype(np.int32).reshape(batch, max_pages)


def choose_kept(rng: np.random.Generator, rows: int, keep: int, base: int, valid_len: int) -> NDArray[np.int32]:
    """`rows` random sets of `keep` ordinals within `base..valid_len`, ascending."""
    picks = [np.sort(rng.choice(valid_len - base, keep, replace=False)) + base for _ in range(rows)]
    return np.stack(picks).astype(np.int32) if rows else np.zeros((0, keep), dtype=np.int32)

"""What `build_compaction_params` refuses: argument, expected, got; no pool byte changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from shared.kernels.compaction.inputs import RoundInputs
from shared.kernels.compaction.layout import CacheLayout, Family, PoolGroup
from shared.kernels.compaction.modes import Mode, RowMode
from shared.kernels.compaction.params import build_compaction_params
from shared.kv_spec import Layout

Spoil = Callable[[PoolGroup], PoolGroup]


def pool(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full(shape or (6, 2, 2, 4, 8), 3, dtype=dtype)


def group(**changes: object) -> PoolGroup:
    made = PoolGroup((0, 1), (pool(), pool()), torch.zeros(3, 5, dtype=torch.int32))
    return replace(made, **changes)  # type: ignore[arg-type]  # a test's shorthand


def arguments(*groups: PoolGroup, layout: Layout = Layout.PAGED) -> tuple[CacheLayout, RoundInputs]:
    sound = CacheLayout(Layout.PAGED, (group(),))
    inputs = RoundInputs.allocate(sound, row_mode=RowMode.UNION, keep_capacity=8, tail_capacity=2)
    return CacheLayout(layout, groups), inputs


def test_sound_arguments_are_accepted() -> None:
    layout, inputs = arguments(group())
    assert build_compaction_params(layout, inputs).batch == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": (1, 0)}, r"layers: expected ascending layer indices, one for each of 2 pools, got \(1, 0\)"),
        ({"layers": (0,)}, r"layers: .*got \(0,\)"),
        ({"layers": (), "pools": ()}, r"layers: .*got \(\)"),
        ({"window": 4}, r"window: expected .*None for any other, got 4 for full"),
        ({"family": Family.MASKED_WINDOW}, r"window: .*got None for masked_window"),
        ({"family": Family.MASKED_WINDOW, "window": 0}, r"window: .*got 0 for masked_window"),
        (
            {"family": Family.MASKED_WINDOW, "window": 4, "mode": Mode.HOLE_FILLING},
            r"mode: expected ordered: a sliding window is masked by physical order, got hole_filling",
        ),
        ({"family": Family.MASKED_WINDOW, "window": 9}, r"window: expected at most the keep capacity 8.*got 9"),
        ({"block_table": torch.zeros(3, 5)}, r"block_table: expected torch.int32, got torch.float32"),
        ({"block_table": torch.zeros(3, dtype=torch.int32)}, r"block_table: expected rank 2, got shape \(3,\)"),
        ({"block_table": torch.zeros(2, 5, dtype=torch.int32)}, r"block_table: expected shape \[3, max_pages\], got \(2, 5\)"),
        ({"block_table": torch.zeros(3, 0, dtype=torch.int32)}, r"block_table: expected shape \[3, max_pages\], got \(3, 0\)"),
        ({"block_table": torch.zeros(5, 3, dtype=torch.int32).T}, r"block_table: expected inner stride 1, got strides \(1, 3\)"),
        (
            {"block_table": torch.zeros(3, 5, dtype=torch.int32, device="meta")},
            r"block_table: expected a tensor on cpu, got one on meta",
        ),
        ({"pools": (pool(), pool().to("meta"))}, r"pools \(layer 1\): expected a tensor on cpu, got one on meta"),
        ({"pools": (pool(dtype=torch.float64),) * 2}, r"pools \(layer 0\): expected one of float32.*got torch.float64"),
        ({"pools": (pool(6, 2, 2, 4),) * 2}, r"pools \(layer 0\): expected shape \[pages, 2, kv_heads.*got \(6, 2, 2, 4\)"),
        ({"pools": (pool(6, 3, 2, 4, 8),) * 2}, r"pools \(layer 0\): expected shape .*got \(6, 3, 2, 4, 8\)"),
        ({"pools": (pool(0, 2, 2, 4, 8),) * 2}, r"pools \(layer 0\): expected shape .*got \(0, 2, 2, 4, 8\)"),
        ({"pools": (pool(6, 2, 2, 8, 4).transpose(3, 4),) * 2}, r"pools \(layer 0\): expected head_dim contiguous"),
        (
            {"pools": (pool(), pool(dtype=torch.float16))},
            r"pools \(layer 1\): expected the group's geometry \(torch.bfloat16.*float16",
        ),
        ({"pools": (pool(), pool(6, 2, 2, 4, 16))}, r"pools \(layer 1\): expected the group's geometry .*16\), strides"),
        ({"pools": (pool(), pool(6, 2, 2, 5, 8)[:, :, :, :4])}, r"pools \(layer 1\): expected the group's geometry .*strides"),
        ({"pools": (pool(1, 2, 2, 4, 8).expand(6, 2, 2, 4, 8),) * 2}, r"pools \(layer 0\): expected strides that give every cell"),
    ],
)
def test_groups(changes: dict[str, object], message: str) -> None:
    layout, inputs = arguments(group(**changes))
    with pytest.raises(ValueError, match=rf"^layout.groups\[0\].{message}"):
        build_compaction_params(layout, inputs)


def test_int32_ranges() -> None:
    """Cells, ordinals and moves are counted in int32. Meta tensors stand in for memory nobody has."""
    meta = torch.device("meta")
    cells = torch.empty(2**29, 2, 1, 4, 1, dtype=torch.int8, device=meta)
    table = torch.empty(3, 5, dtype=torch.int32, device=meta)
    layout = CacheLayout(Layout.PAGED, (PoolGroup((0,), (cells,), table),))
    inputs = RoundInputs.allocate(layout, row_mode=RowMode.UNION, keep_capacity=8)
    with pytest.raises(ValueError, match=r"pools: expected fewer than 2\^31 cells \(pages x page_size\), got 2147483648"):
        build_compaction_params(layout, inputs)
    wide = PoolGroup((0,), (cells[:4],), torch.empty(3, 2**29, dtype=torch.int32, device=meta))
    with pytest.raises(ValueError, match=r"block_table: expected fewer than 2\^31 ordinals"):
        build_compaction_params(CacheLayout(Layout.PAGED, (wide,)), inputs)
    sound = CacheLayout(Layout.PAGED, (PoolGroup((0,), (cells[:4],), table),))
    huge = RoundInputs.allocate(sound, row_mode=RowMode.UNION, keep_capacity=2**30)
    with pytest.raises(ValueError, match=r"inputs: expected fewer than 2\^31 moves in a round .*got 3221225472"):
        build_compaction_params(sound, huge)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kept": torch.zeros(3, 1, 8)}, "inputs.kept: expected torch.int32, got torch.float32"),
        (
            {"kept": torch.zeros(3, 2, 8, dtype=torch.int32)},
            r"inputs.kept: expected 1 decision rows for row_mode union, got \(3, 2, 8\)",
        ),
        ({"kept": torch.zeros(3, 1, 9, dtype=torch.int32)[:, :, :8]}, "inputs.kept: expected a contiguous tensor"),
        (
            {"kept": torch.zeros(3, 1, 0, dtype=torch.int32)},
            "inputs: expected keep_capacity >= 1 and tail_capacity >= 0, got 0 and 2",
        ),
        ({"tail_capacity": -1}, "inputs: expected keep_capacity >= 1 and tail_capacity >= 0, got 8 and -1"),
        ({"move_offsets": torch.zeros(3, dtype=torch.int32)}, r"inputs.move_offsets: expected 4 rows, got \(3,\)"),
        ({"tail": torch.zeros(3, dtype=torch.int64)}, "inputs.tail: expected torch.int32, got torch.int64"),
        ({"draft_tail": torch.zeros(2, dtype=torch.int32)}, r"inputs.draft_tail: expected 3 rows, got \(2,\)"),
        ({"base": torch.zeros(3, 1, dtype=torch.int32)}, r"inputs.base: expected rank 1, got shape \(3, 1\)"),
        (
            {"valid_len": torch.zeros(3, dtype=torch.int32, device="meta")},
            "inputs.valid_len: expected a tensor on cpu, got one on meta",
        ),
    ],
)
def test_inputs(changes: dict[str, object], message: str) -> None:
    layout, inputs = arguments(group())
    with pytest.raises(ValueError, match=f"^{message}"):
        build_compaction_params(layout, replace(inputs, **changes))  # type: ignore[arg-type]  # a test's shorthand


def test_layout_and_layers() -> None:
    layout, inputs = arguments()
    with pytest.raises(ValueError, match=r"layout.groups: expected at least one group, got none"):
        build_compaction_params(layout, inputs)
    layout, inputs = arguments(group(), group(layers=(1, 2)))
    with pytest.raises(ValueError, match=r"layout.groups: expected every layer in one group, got layers \[0, 1, 1, 2\]"):
        build_compaction_params(layout, inputs)
    layout, inputs = arguments(group(), layout=Layout.LINEAR)
    with pytest.raises(ValueError, match=r"expected shape \[2, pages, kv_heads, page_size, head_dim\] for the linear layout"):
        build_compaction_params(layout, inputs)


def test_aliasing_pools_are_refused_and_untouched() -> None:
    one = pool()
    layout, inputs = arguments(group(pools=(one, one)))
    with pytest.raises(ValueError, match="pools of layout layer 0 and layout layer 1: expected memory of their own"):
        build_compaction_params(layout, inputs)
    layout, inputs = arguments(group(layers=(0,), pools=(one,)))
    draft = CacheLayout(Layout.PAGED, (group(layers=(0,), pools=(one[:4],)),))
    with pytest.raises(ValueError, match="pools of layout layer 0 and draft layer 0: expected memory of their own"):
        build_compaction_params(layout, inputs, draft=draft)
    assert bool((one == 3).all())


def test_layers_interleaved_in_one_allocation_are_accepted() -> None:
    storage = torch.zeros(6, 2, 2, 2, 4, 8)  # pages, layers, ...
    layout, inputs = arguments(group(pools=(storage[:, 0], storage[:, 1])))
    build_compaction_params(layout, inputs)


def test_draft() -> None:
    layout, _ = arguments(group())
    per_head = RoundInputs.allocate(layout, row_mode=RowMode.PER_HEAD, keep_capacity=8)
    with pytest.raises(ValueError, match=r"inputs.row_mode: expected union where a draft cache follows.*got per_head"):
        build_compaction_params(layout, per_head, draft=CacheLayout(Layout.PAGED, (group(),)))
    layout, inputs = arguments(group())
    spoilt = CacheLayout(Layout.PAGED, (group(layers=(1, 0)),))
    with pytest.raises(ValueError, match=r"^draft.groups\[0\].layers"):
        build_compaction_params(layout, inputs, draft=spoilt)
    wide = CacheLayout(Layout.PAGED, (group(family=Family.MASKED_WINDOW, window=9),))
    with pytest.raises(ValueError, match=r"^draft.groups\[0\].window: expected at most the keep capacity 8"):
        build_compaction_params(layout, inputs, draft=wide)

"""Host validation of everything a round will use. Each failure is a ValueError: argument, expected, got."""

from __future__ import annotations

from itertools import combinations
from typing import NoReturn

import torch

from shared.kernels.compaction.geometry import byte_view, cells_overlap, geometry_of, may_alias
from shared.kernels.compaction.inputs import RoundInputs, decision_rows
from shared.kernels.compaction.layout import CacheLayout, Family, PoolGroup
from shared.kernels.compaction.modes import Mode, RowMode
from shared.kv_spec import DType, Layout

INT32_LIMIT = 2**31
_DTYPES = {getattr(torch, dtype.value) for dtype in DType}


def check_arguments(layout: CacheLayout, inputs: RoundInputs, draft: CacheLayout | None) -> None:
    """Raise ValueError for the first argument that does not fit. Nothing is read but metadata."""
    device = inputs.kept.device
    _check_cache("layout", layout, device, inputs.batch)
    _check_inputs(layout, inputs, device)
    if draft is not None:
        _check_cache("draft", draft, device, inputs.batch)
        if inputs.row_mode is not RowMode.UNION:
            _fail("inputs.row_mode", "union where a draft cache follows the target's decision", inputs.row_mode)
        _check_windows("draft", draft, inputs)
    _check_windows("layout", layout, inputs)
    _check_aliasing([("layout", layout), *([("draft", draft)] if draft is not None else [])])


def _check_cache(name: str, cache: CacheLayout, device: torch.device, batch: int) -> None:
    if not cache.groups:
        _fail(f"{name}.groups", "at least one group", "none")
    layers = [layer for group in cache.groups for layer in group.layers]
    if len(set(layers)) != len(layers):
        _fail(f"{name}.groups", "every layer in one group", f"layers {sorted(layers)}")
    for index, group in enumerate(cache.groups):
        _check_group(f"{name}.groups[{index}]", group, cache.layout, device, batch)


def _check_group(name: str, group: PoolGroup, layout: Layout, device: torch.device, batch: int) -> None:
    if not group.layers or list(group.layers) != sorted(set(group.layers)) or len(group.layers) != len(group.pools):
        _fail(f"{name}.layers", f"ascending layer indices, one for each of {len(group.pools)} pools", group.layers)
    masked = group.family is Family.MASKED_WINDOW
    if masked != (group.window is not None) or (group.window is not None and group.window < 1):
        _fail(f"{name}.window", "at least 1 for a masked_window group and None for any other", f"{group.window} for {group.family}")
    if masked and group.mode is Mode.HOLE_FILLING:
        _fail(f"{name}.mode", "ordered: a sliding window is masked by physical order", group.mode)
    _check_table(f"{name}.block_table", group.block_table, device, batch)
    for layer, pool in zip(group.layers, group.pools, strict=True):
        _check_pool(f"{name}.pools (layer {layer})", pool, group.pools[0], layout, device)
    geometry = geometry_of(byte_view(group.pools[0], layout))
    if geometry.num_cells >= INT32_LIMIT:
        _fail(f"{name}.pools", "fewer than 2^31 cells (pages x page_size)", geometry.num_cells)
    if group.block_table.shape[1] * geometry.page_size >= INT32_LIMIT:
        _fail(f"{name}.block_table", "fewer than 2^31 ordinals (max_pages x page_size)", tuple(group.block_table.shape))


def _check_pool(name: str, pool: torch.Tensor, first: torch.Tensor, layout: Layout, device: torch.device) -> None:
    if pool.device != device:
        _fail(name, f"a tensor on {device}", f"one on {pool.device}")
    if pool.dtype not in _DTYPES:
        _fail(name, f"one of {', '.join(DType)}", pool.dtype)
    if pool.dim() != 5 or pool.shape[layout.kv_dim] != 2 or 0 in pool.shape:
        expected = (
            "[pages, 2, kv_heads, page_size, head_dim]" if layout is Layout.PAGED else "[2, pages, kv_heads, page_size, head_dim]"
        )
        _fail(name, f"shape {expected} for the {layout} layout", tuple(pool.shape))
    if pool.stride(4) != 1:
        _fail(name, "head_dim contiguous (stride 1)", f"strides {pool.stride()}")
    if (pool.dtype, pool.shape, pool.stride()) != (first.dtype, first.shape, first.stride()):
        _fail(
            name,
            f"the group's geometry ({first.dtype}, shape {tuple(first.shape)}, strides {first.stride()})",
            f"{pool.dtype}, shape {tuple(pool.shape)}, strides {pool.stride()}",
        )
    if cells_overlap(byte_view(pool, layout)):
        _fail(name, "strides that give every cell its own bytes", f"strides {pool.stride()} for shape {tuple(pool.shape)}")


def _check_table(name: str, table: torch.Tensor, device: torch.device, batch: int) -> None:
    _check_tensor(name, table, device, rank=2)
    if table.shape[0] != batch or table.shape[1] < 1:
        _fail(name, f"shape [{batch}, max_pages]", tuple(table.shape))
    if table.stride(1) != 1:
        _fail(name, "inner stride 1", f"strides {table.stride()}")


def _check_inputs(layout: CacheLayout, inputs: RoundInputs, device: torch.device) -> None:
    for name, rank in {"kept": 3, "move_offsets": 1, "tail": 1, "draft_tail": 1, "base": 1, "valid_len": 1}.items():
        tensor = getattr(inputs, name)
        _check_tensor(f"inputs.{name}", tensor, device, rank)
        if not tensor.is_contiguous():
            _fail(f"inputs.{name}", "a contiguous tensor", f"strides {tensor.stride()}")
        rows = inputs.batch + (name == "move_offsets")
        if tensor.shape[0] != rows:
            _fail(f"inputs.{name}", f"{rows} rows", tuple(tensor.shape))
    expected = decision_rows(layout, inputs.row_mode)
    if inputs.kept.shape[1] != expected:
        _fail("inputs.kept", f"{expected} decision rows for row_mode {inputs.row_mode}", tuple(inputs.kept.shape))
    if inputs.keep_capacity < 1 or inputs.tail_capacity < 0:
        _fail("inputs", "keep_capacity >= 1 and tail_capacity >= 0", f"{inputs.keep_capacity} and {inputs.tail_capacity}")
    total = inputs.batch * (inputs.keep_capacity + inputs.tail_capacity)
    if total >= INT32_LIMIT:
        _fail("inputs", "fewer than 2^31 moves in a round (batch x (keep_capacity + tail_capacity))", total)


def _check_windows(name: str, cache: CacheLayout, inputs: RoundInputs) -> None:
    for index, group in enumerate(cache.groups):
        if group.family is Family.MASKED_WINDOW and inputs.keep_capacity < (group.window or 0):
            _fail(
                f"{name}.groups[{index}].window",
                f"at most the keep capacity {inputs.keep_capacity}: a round must keep a masked window whole",
                group.window,
            )


def _check_aliasing(caches: list[tuple[str, CacheLayout]]) -> None:
    pools = [
        (f"{name} layer {layer}", byte_view(pool, cache.layout))
        for name, cache in caches
        for group in cache.groups
        for layer, pool in zip(group.layers, group.pools, strict=True)
    ]
    for (name_a, a), (name_b, b) in combinations(pools, 2):
        if may_alias(a, b):
            _fail(f"pools of {name_a} and {name_b}", "memory of their own", "overlapping memory")


def _check_tensor(name: str, tensor: torch.Tensor, device: torch.device, rank: int) -> None:
    if tensor.device != device:
        _fail(name, f"a tensor on {device}", f"one on {tensor.device}")
    if tensor.dtype is not torch.int32:
        _fail(name, "torch.int32", tensor.dtype)
    if tensor.dim() != rank:
        _fail(name, f"rank {rank}", f"shape {tuple(tensor.shape)}")


def _fail(argument: str, expected: object, got: object) -> NoReturn:
    raise ValueError(f"{argument}: expected {expected}, got {got}")

"""From a cache spec to groups, and which memory two pools may share."""

from __future__ import annotations

import pytest
import torch

from shared.kernels.compaction.geometry import byte_view, cells_overlap, geometry_of, may_alias
from shared.kernels.compaction.layout import CacheLayout, Family
from shared.kernels.compaction.modes import Mode
from shared.kv_spec import DType, KVCacheSpec, LayerGroup, Layout

SPEC = KVCacheSpec(
    groups=(LayerGroup((0, 2), 2, 8, DType.BFLOAT16), LayerGroup((1,), 4, 16, DType.INT8, window=6)),
    layout=Layout.PAGED,
    page_size=4,
    max_len=32,
)


def pools_of(spec: KVCacheSpec) -> list[torch.Tensor]:
    return [torch.zeros(spec.pool_shape(group, 5), dtype=getattr(torch, group.dtype.value)) for _, group in spec.iter_layers()]


@pytest.mark.parametrize("mode", Mode)
def test_from_spec(mode: Mode) -> None:
    """The mode is for full attention; windows stay ordered, where order is what the mask goes by."""
    table = torch.zeros(3, 8, dtype=torch.int32)
    pools = pools_of(SPEC)
    full, window = CacheLayout.from_spec(SPEC, pools, table, mode).groups
    assert full.layers == (0, 2)
    assert [pool.data_ptr() for pool in full.pools] == [pools[0].data_ptr(), pools[2].data_ptr()]
    assert (full.family, full.window, full.mode) == (Family.FULL, None, mode)
    assert (window.layers, window.family, window.window, window.mode) == ((1,), Family.MASKED_WINDOW, 6, Mode.ORDERED)
    assert full.block_table is table


def test_from_spec_counts_the_pools() -> None:
    with pytest.raises(ValueError, match="pools: expected one tensor for each of 3 layers, got 2"):
        CacheLayout.from_spec(SPEC, pools_of(SPEC)[:2], torch.zeros(3, 8, dtype=torch.int32))


def test_full_layers_in_model_order() -> None:
    layout = CacheLayout.from_spec(SPEC, pools_of(SPEC), torch.zeros(3, 8, dtype=torch.int32))
    assert layout.full_layers() == ((0, 2), (2, 2))


def test_both_layouts_look_the_same_as_bytes() -> None:
    paged = geometry_of(byte_view(torch.zeros(5, 2, 3, 4, 8, dtype=torch.float16), Layout.PAGED))
    linear = geometry_of(byte_view(torch.zeros(2, 5, 3, 4, 8, dtype=torch.float16), Layout.LINEAR))
    assert (paged.num_pages, paged.kv_heads, paged.page_size, paged.row_bytes) == (5, 3, 4, 16)
    assert (linear.num_pages, linear.kv_heads, linear.page_size, linear.row_bytes) == (5, 3, 4, 16)
    assert (paged.page_stride, paged.kv_stride, paged.head_stride, paged.token_stride) == (384, 192, 64, 16)
    assert (linear.page_stride, linear.kv_stride, linear.head_stride, linear.token_stride) == (192, 960, 64, 16)


def view(storage: torch.Tensor, offset: int, stride: int) -> torch.Tensor:
    """Two pages of 2 x 1 x 4 x 8 bytes, `stride` apart."""
    return storage.as_strided((2, 2, 1, 4, 8), (stride, 32, 32, 8, 1), offset)


@pytest.mark.parametrize(
    ("offset", "stride", "other_stride", "aliases"),
    [
        (0, 64, 64, True),
        (128, 64, 64, False),  # side by side
        (127, 64, 64, True),
        (64, 128, 128, False),  # interleaved page by page
        (63, 128, 128, True),
        (64, 127, 127, True),  # the second page of one reaches into the other
        (64, 128, 192, True),  # differing strides: not told apart, so refused
    ],
)
def test_may_alias(offset: int, stride: int, other_stride: int, aliases: bool) -> None:
    storage = torch.zeros(1024, dtype=torch.uint8)
    a, b = view(storage, 0, stride), view(storage, offset, other_stride)
    assert may_alias(a, b) is aliases
    assert may_alias(b, a) is aliases


def test_linear_layers_in_one_allocation_do_not_alias() -> None:
    storage = torch.zeros(2, 3, 5, 2, 8, 16, dtype=torch.uint8)  # K/V, layer, slot, ...
    layers = [byte_view(storage[:, layer], Layout.LINEAR) for layer in range(3)]
    assert not may_alias(layers[0], layers[1])
    assert not may_alias(layers[2], layers[0])
    assert may_alias(layers[1], layers[1])


def test_cells_overlap() -> None:
    pool = torch.zeros(3, 2, 2, 4, 8, dtype=torch.uint8)
    assert not cells_overlap(pool)
    assert not cells_overlap(pool.transpose(0, 1))
    assert cells_overlap(pool[:1].expand(3, 2, 2, 4, 8))
    assert not cells_overlap(pool[:1])
    assert cells_overlap(pool.as_strided((3, 2, 2, 4, 8), (127, 64, 32, 8, 1)))

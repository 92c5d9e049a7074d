"""The pool tensors: shapes of both layouts, one address for life, and the page views that hide the layout."""

from __future__ import annotations

import pytest
import torch

from runtime_service.kv.pool import KVPool, V
from shared.errors import MemoryExhausted
from shared.ids import PageId
from shared.kv_spec import DType, KVCacheSpec, LayerGroup, Layout
from tests.support.entries import keys_of

GROUPS = (
    LayerGroup(layers=(0, 2), kv_heads=2, head_dim=4, dtype=DType.FLOAT32),
    LayerGroup(layers=(1,), kv_heads=3, head_dim=2, dtype=DType.BFLOAT16, window=8),
)
PAGED = KVCacheSpec(GROUPS, Layout.PAGED, page_size=4, max_len=16)
LINEAR = KVCacheSpec(GROUPS, Layout.LINEAR, page_size=16, max_len=16)
both_layouts = pytest.mark.parametrize("spec", [PAGED, LINEAR], ids=str)


def fill(pool: KVPool) -> None:
    """Every element of a layer another value."""
    for tensor in pool.tensors:
        tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape))


def test_shapes_dtypes_and_bytes() -> None:
    pool = KVPool(PAGED, num_pages=6)
    assert [tuple(t.shape) for t in pool.tensors] == [(6, 2, 2, 4, 4), (6, 2, 3, 4, 2), (6, 2, 2, 4, 4)]
    assert [t.dtype for t in pool.tensors] == [torch.float32, torch.bfloat16, torch.float32]
    assert [tuple(t.shape) for t in KVPool(LINEAR, num_pages=3).tensors] == [(2, 3, 2, 16, 4), (2, 3, 3, 16, 2), (2, 3, 2, 16, 4)]
    assert pool.num_bytes == sum(t.numel() * t.element_size() for t in pool.tensors)
    assert not any(t.any() for t in pool.tensors)


@both_layouts
def test_a_page_view_is_the_pool_itself(spec: KVCacheSpec) -> None:
    pool = KVPool(spec, num_pages=3)
    pool.by_page(0)[2, V, 1, 3, 0] = 5
    index = (2, V, 1, 3, 0) if spec.layout is Layout.PAGED else (V, 2, 1, 3, 0)
    assert pool.tensors[0][index] == 5
    assert pool.by_page(0).shape[:2] == (3, 2)


@both_layouts
def test_norms_come_in_ordinal_order_of_layers_that_hold_everything(spec: KVCacheSpec) -> None:
    pool = KVPool(spec, num_pages=6)
    fill(pool)
    pages = [PageId(5), PageId(2), PageId(4)][: spec.pages_for(10)]
    full = [(layer, group) for layer, group in spec.iter_layers() if group.window is None]
    norms = pool.key_norms(pages, 10)
    assert len(norms) == len(full)
    for got, (layer, group) in zip(norms, full, strict=True):
        keys = keys_of(pool, layer, pages, 10)
        assert keys.shape == (group.kv_heads, 10, group.head_dim)
        torch.testing.assert_close(got, keys.float().norm(dim=-1))


@both_layouts
def test_a_copied_page_is_its_own_bytes_in_every_layer(spec: KVCacheSpec) -> None:
    """BR-037."""
    pool = KVPool(spec, num_pages=4)
    fill(pool)
    before = [pool.by_page(layer).clone() for layer in range(3)]
    addresses = [t.data_ptr() for t in pool.tensors]
    pool.copy_page(PageId(1), PageId(3))
    for layer, old in enumerate(before):
        expected = old.clone()
        expected[3] = old[1]
        assert torch.equal(pool.by_page(layer), expected)
        pool.by_page(layer)[1] = 0
        assert torch.equal(pool.by_page(layer)[3], old[1])
    assert [t.data_ptr() for t in pool.tensors] == addresses


def test_a_pool_that_does_not_fit_says_how_large_it_is() -> None:
    with pytest.raises(MemoryExhausted, match=f"takes {(1 << 40) * PAGED.page_bytes} bytes on cpu"):
        KVPool(PAGED, num_pages=1 << 40)


def test_a_pool_without_a_page_to_own_is_refused() -> None:
    with pytest.raises(ValueError, match="num_pages 1"):
        KVPool(PAGED, num_pages=1)

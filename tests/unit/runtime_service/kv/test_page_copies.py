"""Pages copied many at a time, against the same copied one by one."""

from __future__ import annotations

import pytest
import torch

from runtime_service.kv import page_copies
from runtime_service.kv.page_copies import PageCopies
from runtime_service.kv.pool import KVPool
from shared.ids import PageId
from shared.kv_spec import DType, KVCacheSpec, LayerGroup, Layout

GROUPS = (LayerGroup((0, 2), 2, 8, DType.FLOAT32), LayerGroup((1,), 1, 16, DType.BFLOAT16))
COPIES = [(PageId(source), PageId(target)) for source, target in ((3, 9), (1, 7), (3, 8), (2, 4), (5, 6))]


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("staged_pages", [1, 2, 64])
def test_every_layer_holds_what_single_copies_leave(layout: Layout, staged_pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of two geometries; more copies than are staged at once; a source that two share."""
    spec = KVCacheSpec(GROUPS, layout, page_size=16 if layout is Layout.LINEAR else 4, max_len=16)
    widest = max(2 * group.kv_heads * group.head_dim * spec.page_size * group.dtype.itemsize for group in GROUPS)
    monkeypatch.setattr(page_copies, "_STAGING_BYTES", staged_pages * widest)
    one, other = KVPool(spec, 10), KVPool(spec, 10)
    for pool in (one, other):
        for tensor in pool.tensors:
            tensor.copy_(torch.arange(tensor.numel()).view_as(tensor) % 251)
    copies = PageCopies(one)
    copies.run(COPIES)
    copies.run([])
    for source, target in COPIES:
        other.copy_page(source, target)
    for got, wanted in zip(one.tensors, other.tensors, strict=True):
        assert torch.equal(got, wanted)


def test_a_page_larger_than_the_staging_goes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_copies, "_STAGING_BYTES", 1)
    pool = KVPool(KVCacheSpec(GROUPS, Layout.PAGED, page_size=4, max_len=16), 4)
    pool.by_page(0)[1] = 5.0
    PageCopies(pool).run([(PageId(1), PageId(2))])
    assert torch.equal(pool.by_page(0)[2], pool.by_page(0)[1])

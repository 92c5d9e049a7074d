"""A paged pool in a TensorRT network: `[2 * num_pages, kv_heads, page_size, head_dim]`, row 2p the keys of page p, row 2p + 1 its
values.

A run is cut at page borders into runs, so each pool row takes at most one run a step. That is KVCacheUpdate's packed form: the
new rows one after another in the order of the pool rows, how many each pool row takes, and the cell of its first.
"""

from __future__ import annotations

import numpy as np
import tensorrt as trt

from compiler_service.backends.tensorrt.layers import ITensor, Layers


def write_packed(layers: Layers, pool: ITensor, k: ITensor, v: ITensor, order: ITensor, ends: ITensor, offsets: ITensor) -> ITensor:
    """The pool with the new rows of `k` and `v [B, kv_heads, n, head_dim]`; the three int32 inputs as shared/bindings.py says."""
    _, heads, _, head_dim = pool.shape
    rows = [layers.reshape(new, (-1, heads, head_dim), permute=(0, 2, 1, 3)) for new in (k, v)]
    update = layers.gather(layers.concat(rows), order)
    layer = layers.network.add_kv_cache_update(pool, update, offsets, trt.KVCacheMode.LINEAR)
    written = layers.output(layer, "kv_cache_update")
    layer.update_form = trt.AttentionIOForm.PACKED_NHD
    layer.update_lengths = ends
    return written


def gather_pages(layers: Layers, pool: ITensor, table: ITensor, max_pages: int) -> tuple[ITensor, ITensor]:
    """Keys and values `[B, kv_heads, max_pages * page_size, head_dim]` of the pages that `table` int32 `[B, max_pages]` names."""
    _, heads, page_size, head_dim = pool.shape
    two, one = (layers.constant(np.array([[number]], dtype=np.int32)) for number in (2, 1))
    key_rows = layers.elementwise("PROD", table, two)
    rows = (key_rows, layers.elementwise("SUM", key_rows, one))
    k, v = (
        layers.reshape(layers.gather(pool, row), (0, heads, max_pages * page_size, head_dim), permute=(0, 2, 1, 3, 4))
        for row in rows
    )
    return k, v

"""A plan that no compiler of ours would build: somebody reads a cache's old value beside the write to it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from compiler_service.backends.tensorrt.host import without_gpu

SHAPE = (1, 2, 8, 4)
COUNT = 3


def write_hazard_plan(path: Path) -> None:
    """Inputs cache, update and start; outputs cache.updated at the cache's address, and old, which was computed first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with without_gpu():
        import tensorrt as trt
        import torch_tensorrt  # noqa: F401 - makes `tensorrt` importable

        from compiler_service.backends.tensorrt.layers import Layers
        from compiler_service.backends.tensorrt.plan import Builder

        builder = Builder()
        layers = Layers(builder.network, [])
        cache = builder.network.add_input("cache", trt.float32, SHAPE)
        update = builder.network.add_input("update", trt.float32, (*SHAPE[:2], COUNT, SHAPE[3]))
        start = builder.network.add_input("start", trt.int32, (1,))
        old = layers.elementwise("PROD", cache, layers.constant(np.full((1, 1, 1, 1), 2.0, np.float32)))
        written = layers.output(layers.network.add_kv_cache_update(cache, update, start, trt.KVCacheMode.LINEAR), "write")
        for name, tensor in (("cache.updated", written), ("old", old)):
            tensor.name = name
            builder.network.mark_output(tensor)
        path.write_bytes(builder.build([], ("sm80",), lambda *_: None))

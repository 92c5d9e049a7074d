"""Torch-TensorRT on a host without a GPU: what it asks CUDA at import is answered for it, and only while it asks.

Its import reads the capability of device 0, and its decompositions place scratch tensors on that device. Neither decides
anything in the engines built here, whose targets are stated (network.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

_ANSWERED_CAPABILITY = (8, 0)


@contextmanager
def without_gpu() -> Iterator[None]:
    """Within: `import torch_tensorrt` works, and its decompositions compute on the CPU. Nothing changes where there is a GPU."""
    if torch.cuda.is_available():
        yield
        return
    with (
        patch.object(torch.cuda, "get_device_capability", lambda *_, **__: _ANSWERED_CAPABILITY),
        patch.object(torch.cuda, "current_device", lambda: 0),
    ):
        from torch_tensorrt.dynamo.lowering import _decompositions

        with patch.object(_decompositions, "to_torch_device", lambda _: torch.device("cpu")):
            yield


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The decompositions to the ops that Torch-TensorRT's converters know. To be used inside `without_gpu`."""
    from torch_tensorrt.dynamo.lowering import get_decompositions

    table: dict[Any, Callable[..., Any]] = get_decompositions()
    return table

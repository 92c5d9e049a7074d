"""From the host to a device without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(value: Tensor, device: torch.device) -> Tensor:
    """`value` on `device`, in stream order; a tensor that is there already is returned as it is.

    The host memory it is read from is pinned and its own: torch keeps that until the device has read it.
    """
    if value.device.type != "cpu" or device.type == "cpu":
        return value
    return value.pin_memory().to(device, non_blocking=True)


def select_rows(value: Tensor, rows: list[int]) -> Tensor:
    """`value[rows]` without waiting for the device; `value` itself where that is all of it."""
    if rows == list(range(len(value))):
        return value
    return value[upload(torch.tensor(rows, dtype=torch.int64), value.device)]

"""From the host to a device in the current stream's order, without waiting for it.

The host memory that a device reads from is pinned and each upload's own: torch keeps it until it has been read, so what is uploaded
next never overwrites what is on its way.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MOST_RESERVED_BYTES = 4 << 20
_UPLOADS_IN_FLIGHT = 8
"""Of one size: those of a round, and of the rounds that the device has yet to reach."""


def upload(values: Tensor, device: torch.device) -> Tensor:
    """`values` on `device`; a tensor that is there already is returned as it is."""
    if values.device.type != "cpu" or device.type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def upload_into(target: Tensor, values: Tensor) -> None:
    """`values`, a host tensor of `target`'s shape, into `target`: nothing is allocated on the device."""
    target.copy_(values.pin_memory() if target.is_cuda else values, non_blocking=True)


def reserve_uploads(largest_bytes: int) -> None:
    """Have torch hold pinned memory for uploads of up to `largest_bytes`, some of each size: the driver, asked for more while steps
    run, may wait for them."""
    sizes = [1 << bits for bits in range(9, min(largest_bytes, _MOST_RESERVED_BYTES).bit_length() + 1)]
    blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes for _ in range(_UPLOADS_IN_FLIGHT)]
    del blocks  # torch keeps what it was given back


def select_rows(values: Tensor, rows: list[int]) -> Tensor:
    """`values[rows]` without waiting for the device they are on; `values` itself where that is all of it."""
    if rows == list(range(len(values))):
        return values
    return values[upload(torch.tensor(rows, dtype=torch.int64), values.device)]

"""Moves on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shared.kernels.compaction import reference
from shared.kernels.compaction.binding import BoundGroup
from shared.kernels.compaction.inputs import RoundInputs


def bind(groups: tuple[BoundGroup, ...], inputs: RoundInputs, fault_key: torch.Tensor | None) -> Callable[[int], None]:
    """See `movers.bind`."""
    return reference.bind(groups, inputs, fault_key)

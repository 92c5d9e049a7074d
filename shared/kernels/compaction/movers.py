"""Which code moves the bytes. Every mover does what `reference` does."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from enum import StrEnum

import torch

from shared.errors import BackendUnavailable
from shared.kernels.compaction import cpu, reference
from shared.kernels.compaction.binding import BoundGroup
from shared.kernels.compaction.inputs import RoundInputs


class Mover(StrEnum):
    """reference: the specification, any device, slow. cpu: compiled where there is a compiler. triton: CUDA, SM80 and up."""

    REFERENCE = "reference"
    CPU = "cpu"
    TRITON = "triton"


def choose(mover: Mover | None, device: torch.device) -> Mover:
    """The mover asked for, or the device's. Raises ValueError where it cannot serve the device."""
    chosen = Mover(mover) if mover is not None else (Mover.TRITON if device.type == "cuda" else Mover.CPU)
    if chosen is Mover.CPU and device.type != "cpu":
        raise ValueError(f"mover: expected triton or reference for tensors on {device}, got cpu")
    if chosen is Mover.TRITON and device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"mover: expected cpu or reference for tensors on {device}, got triton (without TRITON_INTERPRET=1)")
    return chosen


def bind(
    mover: Mover, groups: tuple[BoundGroup, ...], inputs: RoundInputs, fault_key: torch.Tensor | None
) -> Callable[[int], None]:
    """A callable that runs one round for a request count; it moves nothing while `fault_key` (int64 scalar) is not negative."""
    if mover is Mover.REFERENCE:
        return reference.bind(groups, inputs, fault_key)
    if mover is Mover.CPU:
        return cpu.bind(groups, inputs, fault_key)
    if importlib.util.find_spec("triton") is None:
        raise BackendUnavailable("moving KV entries on a GPU needs triton: install it, or pass mover=Mover.REFERENCE")
    # Imported here because triton is optional, and because its kernels decide for or against the interpreter when defined.
    from shared.kernels.compaction.triton import mover as triton_mover

    return triton_mover.bind(groups, inputs, fault_key)

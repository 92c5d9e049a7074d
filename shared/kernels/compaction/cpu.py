"""Moves on the CPU: compiled where this host has a C++ compiler (`cpu.cpp`), else vectorised in torch (`portable`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from shared.kernels.build import load_library
from shared.kernels.compaction import portable
from shared.kernels.compaction.binding import BoundGroup
from shared.kernels.compaction.inputs import RoundInputs
from shared.kernels.compaction.modes import Mode

_SOURCE = Path(__file__).with_name("cpu.cpp")


def load() -> bool:
    """Whether moves are compiled here. Compiles them on a machine's first use (about 10 s), which may raise BuildFailed."""
    return load_library("compaction", [_SOURCE]) is not None


def bind(groups: tuple[BoundGroup, ...], inputs: RoundInputs, fault_key: torch.Tensor | None) -> Callable[[int], None]:
    """See `movers.bind`; errors as for `load`."""
    if not load():
        return portable.bind(groups, inputs, fault_key)
    launches = tuple(_bind_group(group, inputs) for group in groups)
    return partial(_run, launches, fault_key)


def _bind_group(group: BoundGroup, inputs: RoundInputs) -> Callable[[int], None]:
    return partial(
        torch.ops.quire.compact_group.default,
        list(group.pools),
        group.block_table,
        inputs.kept,
        inputs.move_offsets,
        inputs.tail,
        group.tail,
        inputs.base,
        inputs.valid_len,
        list(group.first_row),
        group.head_step,
        group.list_layer_step,
        group.window or 0,
        group.mode is Mode.HOLE_FILLING,
        group.scrub,
    )


def _run(launches: tuple[Callable[[int], None], ...], fault_key: torch.Tensor | None, request_count: int) -> None:
    if fault_key is not None and int(fault_key) >= 0:
        return
    for launch in launches:
        launch(request_count)

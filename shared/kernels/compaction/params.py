"""The two calls of a caller: `build_compaction_params` once a geometry, `compact` once a round.

    inputs = RoundInputs.allocate(layout, row_mode=RowMode.UNION, keep_capacity=2048)
    params = build_compaction_params(layout, inputs)
    ...
    compact(params, inputs.stage(requests))     # block tables are filled by their owner

The caller records an event after `compact` and releases pages, or publishes lengths, only behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shared.kernels.compaction import movers
from shared.kernels.compaction.binding import BoundGroup, bind_groups
from shared.kernels.compaction.check import Fault, ValueCheck
from shared.kernels.compaction.inputs import RoundInputs
from shared.kernels.compaction.layout import CacheLayout
from shared.kernels.compaction.validate import check_arguments


@dataclass(frozen=True, slots=True, eq=False)
class CompactionParams:
    """A bound geometry: nothing is looked up, allocated or validated again in a round (the value check excepted, which is for
    tests). Holds its tensors alive; a pool that is reallocated needs new params."""

    inputs: RoundInputs
    groups: tuple[BoundGroup, ...]
    mover: movers.Mover
    check: ValueCheck | None
    _launch: Callable[[int], None]

    @property
    def batch(self) -> int:
        """Most requests of a round."""
        return self.inputs.batch

    def fault(self) -> Fault | None:
        """What the value check found wrong in the last round, which then moved nothing. Waits for the device."""
        return self.check.fault() if self.check is not None else None


def build_compaction_params(
    layout: CacheLayout,
    inputs: RoundInputs,
    *,
    draft: CacheLayout | None = None,
    scrub: bool = False,
    check_values: bool = False,
    mover: movers.Mover | None = None,
) -> CompactionParams:
    """Validate and bind everything a round uses, and compile what it launches.

    `draft`: a speculative draft's cache, moved by the target's (union) decision with its own heads, tables and tails.
    `scrub`: also zero the vacated cells of each request's last kept page. `check_values`: check the inputs' values on the
    device first; a round with a fault moves nothing, see `CompactionParams.fault`. `mover`: default by device, see `movers.Mover`.

    Raises ValueError naming the argument, what was expected and what came; no pool byte is touched.
    """
    check_arguments(layout, inputs, draft)
    groups = bind_groups(layout, inputs, draft, scrub)
    check = ValueCheck.allocate(groups, inputs) if check_values else None
    chosen = movers.choose(mover, inputs.kept.device)
    return CompactionParams(inputs, groups, chosen, check, movers.bind(chosen, groups, inputs, check.key if check else None))


def compact(params: CompactionParams, request_count: int) -> None:
    """Move the first `request_count` requests' survivors, as the inputs and block tables now say, in the current stream's order.

    On CUDA: no allocation, no synchronisation, the same launches whatever the values; safe to capture in a graph, whose replay
    reads the then current values. Request counts beyond the prefix sum's active rows cost an early exit.
    """
    if not 0 <= request_count <= params.batch:
        raise ValueError(f"request_count: expected 0..{params.batch}, got {request_count}")
    if request_count == 0:
        return
    if params.check is not None:
        params.check.run(request_count)
    params._launch(request_count)

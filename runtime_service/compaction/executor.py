"""Carries plans out: binds the pools to the mover once for each kind of round, then stages and launches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch

from runtime_service.compaction.plan import CompactionPlan
from runtime_service.kv.pool import KVPool
from shared.kernels.compaction.inputs import RequestRound, RoundInputs
from shared.kernels.compaction.layout import CacheLayout
from shared.kernels.compaction.modes import Mode, RowMode
from shared.kernels.compaction.params import CompactionParams, build_compaction_params, compact
from shared.kernels.upload import reserve_uploads, upload_into

_UNMAPPED = -1


class RoundExecutor:
    """Moves of up to `max_sequences` sequences at a time.

    `pools`: the target's and, if there is one, its draft's, of which `max_tail` cells of a sequence may be in flight.
    """

    def __init__(self, pools: Sequence[KVPool], max_sequences: int, max_tail: int = 0) -> None:
        self._pools = tuple(pools)
        self._max_tail = max_tail
        self._tables = [
            torch.full((max_sequences, pool.spec.max_pages), _UNMAPPED, dtype=torch.int32, device=pool.device) for pool in pools
        ]
        self._bound: dict[tuple[Mode, RowMode], CompactionParams] = {}
        self._compile_movers()

    def prepare(self, mode: Mode, rows: RowMode, keep: int) -> CompactionParams:
        """What rounds of this kind that keep up to `keep` entries use: allocated when it is first asked for."""
        keep = min(keep, self._pools[0].spec.max_len)
        bound = self._bound.get((mode, rows))
        if bound is None or bound.inputs.keep_capacity < keep:
            bound = self._bound[mode, rows] = self._bind(mode, rows, keep)
        return bound

    def execute(self, plans: Sequence[Sequence[CompactionPlan]]) -> None:
        """Launch the moves, and the scrubbing, in the current stream's order: what is launched behind it sees the result.

        `plans` has one list a pool, sequence by sequence. Without waiting, and without allocating on the device once its kind has
        been prepared.
        """
        kinds: defaultdict[tuple[Mode, RowMode], list[tuple[CompactionPlan, ...]]] = defaultdict(list)
        for parts in zip(*plans, strict=True):
            kinds[parts[0].mode, parts[0].decision.rows].append(parts)
        for (mode, rows), sequences in kinds.items():
            bound = self.prepare(mode, rows, max(target.kept_len for target, *_ in sequences))
            for table, of_pool in zip(self._tables, zip(*sequences, strict=True), strict=True):
                _write_table(table, of_pool)
            compact(bound, bound.inputs.stage([_request_round(*parts) for parts in sequences]))

    def _compile_movers(self) -> None:
        """Here an engine waits to be loaded; in its first round everybody's streams would. Rows and counts change no kernel."""
        windows = [window for pool in self._pools for window in pool.spec.windows]
        least = max(windows, default=1)
        if least <= self._pools[0].spec.max_len:  # else there are no rounds: they keep windows whole
            for mode in (Mode.ORDERED,) if windows else Mode:
                self.prepare(mode, RowMode.UNION, least)

    def _bind(self, mode: Mode, rows: RowMode, keep: int) -> CompactionParams:
        target, *draft = (
            CacheLayout.from_spec(pool.spec, pool.tensors, table, mode)
            for pool, table in zip(self._pools, self._tables, strict=True)
        )
        # To a power of two, so that budgets that grow from request to request are not bound one by one.
        capacity = min(1 << (keep - 1).bit_length(), self._pools[0].spec.max_len)
        inputs = RoundInputs.allocate(target, row_mode=rows, keep_capacity=capacity, tail_capacity=self._max_tail)
        if self._pools[0].device.type == "cuda":
            reserve_uploads(max(inputs.packed.nbytes, *(table.nbytes for table in self._tables)))
        return build_compaction_params(target, inputs, draft=draft[0] if draft else None, scrub=True)


def _write_table(table: torch.Tensor, plans: Sequence[CompactionPlan]) -> None:
    rows = np.full((len(plans), table.shape[1]), _UNMAPPED, dtype=np.int32)
    for row, plan in zip(rows, plans, strict=True):
        row[: len(plan.pages)] = plan.pages
    upload_into(table[: len(plans)], torch.from_numpy(rows))


def _request_round(target: CompactionPlan, draft: CompactionPlan | None = None) -> RequestRound:
    """The mover takes a decision's rows for all layers and derives each layer's moves: it starts at the lowest base.

    At least the last kept entry is listed, moved or not: a request without moves is left alone, vacated cells included.
    """
    base = min(target.kept_len - 1, target.base, target.base if draft is None else draft.base)
    return RequestRound(
        kept=target.decision.kept[:, base:],
        base=base,
        valid_len=target.length,
        tail=target.tail,
        draft_tail=0 if draft is None else draft.tail,
    )

"""Carries plans out: binds the pools to the mover once, then one call a round."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime_service.compaction.plan import CompactionPlan
from runtime_service.kv.pool import KVPool
from shared.kernels.compaction.inputs import RequestRound, RoundInputs, RowMode
from shared.kernels.compaction.layout import CacheLayout
from shared.kernels.compaction.params import build_compaction_params, compact

_UNMAPPED = -1


class RoundExecutor:
    """Moves of up to `max_sequences` sequences of one pool at a time."""

    def __init__(self, pool: KVPool, max_sequences: int) -> None:
        spec = pool.spec
        self.max_sequences = max_sequences
        self._device = pool.device
        self._block_table = torch.full((max_sequences, spec.max_pages), _UNMAPPED, dtype=torch.int32, device=pool.device)
        layout = CacheLayout.from_spec(spec, pool.tensors, self._block_table)
        self._inputs = RoundInputs.allocate(layout, row_mode=RowMode.UNION, keep_capacity=spec.max_len)
        self._params = build_compaction_params(layout, self._inputs, scrub=True)

    def execute(self, plans: Sequence[CompactionPlan]) -> None:
        """Move and scrub. When it returns, the bytes have moved: pages may change hands and lengths may be published."""
        rows = torch.full((len(plans), self._block_table.shape[1]), _UNMAPPED, dtype=torch.int32)
        for row, plan in zip(rows, plans, strict=True):
            row[: len(plan.pages)] = torch.tensor(plan.pages)
        self._block_table[: len(plans)].copy_(rows)
        compact(self._params, self._inputs.stage([_request_round(plan) for plan in plans]))
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _request_round(plan: CompactionPlan) -> RequestRound:
    """The mover takes one list of kept ordinals for all layers and derives each layer's moves: it starts at the lowest base.

    At least the last kept entry is listed, moved or not: a request without moves is left alone, vacated cells included.
    """
    base = min(plan.kept_len - 1, *(moves.base for moves in plan.moves.values()))
    return RequestRound(kept=plan.kept[None, base:], base=base, valid_len=plan.length)

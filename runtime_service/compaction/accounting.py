"""What a plan moves, in numbers."""

from __future__ import annotations

import numpy as np

from runtime_service.compaction.plan import CompactionPlan
from runtime_service.core.evidence import CompactionEvidence
from shared.kernels.compaction.modes import RowMode
from shared.kv_spec import KVCacheSpec


def evidence_of(plan: CompactionPlan, spec: KVCacheSpec, pages_freed: int, duration_s: float) -> CompactionEvidence:
    """One round of one sequence."""
    moved_by_row = (plan.order != np.arange(plan.kept_len)).sum(axis=1)
    rows_moved = bytes_moved = next_row = 0
    for _, group in spec.iter_layers():
        if group.window is not None:
            moved = group.kv_heads * group.window if plan.decision.num_evicted else 0
        else:
            own = slice(next_row, next_row + group.kv_heads) if plan.decision.rows is RowMode.PER_LAYER_HEAD else slice(None)
            next_row += group.kv_heads
            moved = int(moved_by_row[own].sum()) * (group.kv_heads if plan.decision.rows is RowMode.UNION else 1)
        rows_moved += moved
        bytes_moved += moved * 2 * group.row_bytes
    return CompactionEvidence(1, plan.decision.num_evicted, rows_moved, bytes_moved, pages_freed, duration_s)

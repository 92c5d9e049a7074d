"""What a plan moves, in numbers."""

from __future__ import annotations

import numpy as np

from runtime_service.compaction.plan import CompactionPlan
from runtime_service.core.evidence import CompactionEvidence
from shared.kv_spec import KVCacheSpec


def evidence_of(plan: CompactionPlan, spec: KVCacheSpec, pages_freed: int, duration_s: float) -> CompactionEvidence:
    """One round of one sequence."""
    full = [group for _, group in spec.iter_layers() if group.window is None]
    bytes_by_head = np.repeat([2 * group.row_bytes for group in full], [group.kv_heads for group in full])
    # A decision has a row for all heads, one for each head of every layer, or one for each head of each layer: repeated, the last.
    moved_by_head = np.resize((plan.order != np.arange(plan.kept_len)).sum(axis=1), len(bytes_by_head))
    rows_moved, bytes_moved = int(moved_by_head.sum()), int((moved_by_head * bytes_by_head).sum())
    for group in spec.groups:
        if group.window is not None and plan.decision.num_evicted:
            moved = len(group.layers) * group.kv_heads * group.window
            rows_moved += moved
            bytes_moved += moved * 2 * group.row_bytes
    return CompactionEvidence(1, plan.decision.num_evicted, rows_moved, bytes_moved, pages_freed, duration_s)

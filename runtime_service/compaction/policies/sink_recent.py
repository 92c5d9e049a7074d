"""Keep the newest entries, and the sinks that every policy keeps: attention sinks with a recent window.

Source: Xiao et al., Efficient Streaming Language Models with Attention Sinks (2023).
"""

from __future__ import annotations

import torch

from runtime_service.compaction.policy import KVView
from shared.kernels.compaction.modes import RowMode


class SinkRecent:
    """Score = position."""

    rows = RowMode.UNION
    reads_keys = False

    def score(self, view: KVView) -> torch.Tensor:
        return torch.from_numpy(view.positions).float()

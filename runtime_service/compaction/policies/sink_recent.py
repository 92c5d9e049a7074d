"""Keep the newest entries, and the sinks that every policy keeps: attention sinks with a recent window.

Source: Xiao et al., Efficient Streaming Language Models with Attention Sinks (2023).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runtime_service.compaction.policy import KVView
from shared.kernels.compaction.modes import RowMode


class SinkRecent:
    """Score = position."""

    rows = RowMode.UNION
    reads_keys = False

    def score(self, view: KVView) -> NDArray[np.float32]:
        return view.positions.astype(np.float32)

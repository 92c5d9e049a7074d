"""Keep the newest entries, and the sinks that every policy keeps: attention sinks with a recent window.

Source: Xiao et al., Efficient Streaming Language Models with Attention Sinks (2023).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from runtime_service.compaction.policy import KVView


class SinkRecent:
    """Score = position."""

    reads_keys = False

    def score(self, view: KVView) -> NDArray[np.float32]:
        return np.asarray(view.positions, dtype=np.float32)

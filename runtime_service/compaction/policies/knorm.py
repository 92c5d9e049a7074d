"""Keep the entries whose keys are short: a small key norm goes with high attention.

Source: Devoto et al., A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression (2024). There each head keeps its own
entries; here all share one decision, so norms are first divided by their mean over the head, or a head with long keys would
outvote the others.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from runtime_service.compaction.policy import KVView


class KNorm:
    """Score = minus the key norm relative to its head's mean, averaged over heads and layers."""

    reads_keys = True

    def score(self, view: KVView) -> NDArray[np.float32]:
        total = torch.zeros(view.length)
        for layer in view.layers:
            norms_HT = view.keys(layer).float().norm(dim=-1)
            relative_HT = norms_HT / norms_HT.mean(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
            total += relative_HT.mean(dim=0).cpu()
        return (-total / len(view.layers)).numpy()

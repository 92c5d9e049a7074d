"""Keep the entries whose keys are short: a small key norm goes with high attention.

Source: Devoto et al., A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression (2024). There each head of each layer
keeps its own entries. Where heads share a decision, norms are first divided by their mean over the head, or a head with long keys
would outvote the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from runtime_service.compaction.policy import KVView
from shared.kernels.compaction.modes import RowMode


@dataclass(frozen=True, slots=True)
class KNorm:
    """Score = minus the key norm relative to its head's mean, averaged over the heads and layers that share a row."""

    rows: RowMode = RowMode.UNION
    reads_keys = True

    def score(self, view: KVView) -> NDArray[np.float32]:
        norms_LHT = [self._relative_norms(view.keys(layer)) for layer in view.layers]
        match self.rows:
            case RowMode.UNION:
                shared = torch.stack([norms_HT.mean(dim=0) for norms_HT in norms_LHT]).mean(dim=0, keepdim=True)
            case RowMode.PER_HEAD:
                shared = torch.stack(norms_LHT).mean(dim=0)
            case RowMode.PER_LAYER_HEAD:
                shared = torch.cat(norms_LHT)
        return -shared.cpu().numpy()

    @staticmethod
    def _relative_norms(keys_HTD: torch.Tensor) -> torch.Tensor:
        norms_HT = torch.linalg.vector_norm(keys_HTD, dim=-1, dtype=torch.float32)
        relative_HT: torch.Tensor = norms_HT / norms_HT.mean(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        return relative_HT

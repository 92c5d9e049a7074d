"""Keep the entries whose keys are short: a small key norm goes with high attention.

Source: Devoto et al., A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression (2024). There each head of each layer
keeps its own entries. Where heads share a decision, norms are first divided by their mean over the head, or a head with long keys
would outvote the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime_service.compaction.policy import KVView
from shared.kernels.compaction.modes import RowMode


@dataclass(frozen=True, slots=True)
class KNorm:
    """Score = minus the key norm relative to its head's mean, averaged over the heads and layers that share a row."""

    rows: RowMode = RowMode.UNION
    reads_keys = True

    def score(self, view: KVView) -> torch.Tensor:
        by_layer = view.key_norms()
        norms_RT = torch.cat(by_layer)  # a row for each head of each layer
        relative_RT = norms_RT / norms_RT.mean(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        match self.rows:
            case RowMode.UNION:  # every layer has one vote, however many heads it has
                heads = [len(norms_HT) for norms_HT in by_layer]
                if len(set(heads)) == 1:
                    shared_RT = relative_RT.mean(dim=0, keepdim=True)
                else:
                    layers = torch.split(relative_RT, heads)
                    shared_RT = torch.stack([relative_HT.mean(dim=0) for relative_HT in layers]).mean(dim=0, keepdim=True)
            case RowMode.PER_HEAD:
                shared_RT = relative_RT.view(len(by_layer), -1, view.length).mean(dim=0)
            case RowMode.PER_LAYER_HEAD:
                shared_RT = relative_RT
        return -shared_RT

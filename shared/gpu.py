"""The GPU of this host, as targets and devices name it."""

from __future__ import annotations

import torch


def compute_capability() -> str:
    """`sm90` for a Hopper GPU; empty where torch can use none."""
    return "sm" + "".join(map(str, torch.cuda.get_device_capability())) if torch.cuda.is_available() else ""

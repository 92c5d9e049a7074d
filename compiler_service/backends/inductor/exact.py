"""The exported program in float32 arithmetic: the judge where a model's own rounding hides what an engine gets wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

_TIMES_THE_ERROR = 4
"""Twice the angle: errors of the same size in other directions."""


class Float32(fx.Interpreter):
    """Runs a program of bfloat16 as if it were one of float32, on the same weights, which are widened one operation at a time.

    Inputs that are written to are the caller's to widen: a write into a copy made here would be lost.
    """

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = fx.node.map_aggregate((args, kwargs), _widened)
        return super().call_function(target, args, kwargs)


def _widened(value: Any) -> Any:
    if value is torch.bfloat16:
        return torch.float32
    return value.float() if isinstance(value, Tensor) and value.dtype is torch.bfloat16 else value


def farther_than_rounding(got: Tensor, rounded: Tensor, exact: Tensor, least_cosine: float) -> str:
    """How much farther logits `got` are from `exact` than the program's own `rounded` ones explain; empty if they are not.

    All `[batch, vocab]`. By the worst row of each: a model turns the same rounding into an error of its own size for each text.
    """
    cosine, own = (float(torch.cosine_similarity(logits, exact, dim=-1).min()) for logits in (got, rounded))
    least = min(least_cosine, 1 - _TIMES_THE_ERROR * (1 - own))
    if cosine >= least:
        return ""
    return f"logits have cosine {cosine:.5f} to those in float32, the program's own {own:.5f}; at least {least:.5f} is expected"

"""Choose next tokens where the logits are, so that the next step can be launched before the host has seen this one's tokens.

Axes: R rows, V logits of a row. Greedy rows are exact: the lowest id among equal maxima, as in sampling.py. Rows that draw follow
sampling.py step by step with the same uniform number of the same generator; exponentials and sums are the device's, so a token
differs from the host's only where the draw falls within their rounding of a border between two tokens. Rows that need more (a
penalty, logprobs, a minimum length not reached) are for the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from runtime_service.core.sampled import SampledToken
from runtime_service.sampling import SamplerState, no_maximum
from shared.errors import InternalError
from shared.kernels.upload import upload


def needs_host(state: SamplerState) -> bool:
    """Whether the next token of `state` can only be chosen from logits that the host has seen."""
    return state.params.has_penalties or state.forbids_end or state.params.logprobs is not None


class DrawnTokens:
    """One token a row, on its way to the host. `ids` int32 `[R]` on the logits' device."""

    def __init__(self, ids: Tensor, maxima: Tensor) -> None:
        self.ids = ids
        both = torch.stack([ids.float(), maxima])  # ids stay below 2^24, where floats are exact
        self._arrived: torch.cuda.Event | None = None
        if both.is_cuda:
            self._host = torch.empty(both.shape, pin_memory=True)
            self._host.copy_(both, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it so
            self._arrived.record()
        else:
            self._host = both

    def wait(self) -> list[SampledToken | InternalError]:
        """The tokens; an InternalError in the place of a row without a finite maximum. Blocks until they are here."""
        if self._arrived is not None:
            self._arrived.synchronize()
        ids, maxima = self._host.tolist()
        return [
            SampledToken(int(token_id)) if math.isfinite(maximum) else no_maximum(maximum)
            for token_id, maximum in zip(ids, maxima, strict=True)
        ]


def draw_tokens(logits_RV: Tensor, states: Sequence[SamplerState]) -> DrawnTokens:
    """One token for each row of float32 logits; `states` are all of one vocabulary, and none needs the host.

    Takes one number from the generator of every state that draws. Nothing waits for the device.
    """
    logits_RV = logits_RV[:, : states[0].vocab_size]
    maxima_R, ids_R = logits_RV.max(dim=1)
    ids_R = ids_R.clamp(0, states[0].vocab_size - 1)
    drawing = [row for row, state in enumerate(states) if not state.params.is_greedy]
    if drawing:
        rows_D = _upload(drawing, torch.int64, logits_RV.device)
        drawn_D = _draw(logits_RV[rows_D] - maxima_R[rows_D, None], [states[row] for row in drawing])
        ids_R = ids_R.index_copy(0, rows_D, drawn_D)
    return DrawnTokens(ids_R.to(torch.int32), maxima_R)


def _draw(shifted_RV: Tensor, states: Sequence[SamplerState]) -> Tensor:
    """Ids int64 `[R]` drawn from logits whose maximum is 0; the steps of sampling.py's `_draw`, all rows at once."""
    device, vocab_size = shifted_RV.device, shifted_RV.shape[1]
    params = [state.params for state in states]

    def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return _upload(values, dtype, device)[:, None]

    weights_RV = torch.exp(shifted_RV / column([p.temperature for p in params], torch.float32))
    if any(p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0 for p in params):
        # Stable, so that among equal weights the lower id comes first, and is in at the edge.
        sorted_RV, order_RV = weights_RV.sort(dim=1, descending=True, stable=True)
        most_R1 = column([p.top_k if p.top_k > 0 else vocab_size for p in params], torch.int64)
        rank_V = torch.arange(vocab_size, device=device)
        kept_RV = rank_V < most_R1
        mass_RV = torch.where(kept_RV, sorted_RV, 0.0).double().cumsum(dim=1)
        top_p_R1 = column([p.top_p for p in params], torch.float64)
        short_R1 = (mass_RV < top_p_R1 * mass_RV[:, -1:]).sum(dim=1, keepdim=True)
        kept_RV &= (rank_V <= short_R1) | (top_p_R1 >= 1.0)
        kept_RV &= sorted_RV >= column([p.min_p for p in params], torch.float32)
        weights_RV = torch.zeros_like(weights_RV).scatter(1, order_RV, torch.where(kept_RV, sorted_RV, 0.0))
    mass_RV = weights_RV.double().cumsum(dim=1)
    drawn_R1 = column([state.generator.random() for state in states], torch.float64) * mass_RV[:, -1:]
    ids_R = (mass_RV <= drawn_R1).sum(dim=1)
    # The product may round up to the whole mass: then the last token with any weight.
    last_R = vocab_size - 1 - (weights_RV > 0).flip(1).long().argmax(dim=1)
    return torch.minimum(ids_R, last_R)


def _upload(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Values on the device without waiting for it."""
    return upload(torch.tensor(values, dtype=dtype), device)

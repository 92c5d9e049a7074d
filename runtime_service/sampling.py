"""Choose the next token of each row: penalties, temperature, filters, one draw.

Axes: B rows of a batch, V logits of a row (the model's vocabulary, padding included).

A row's outcome depends on its own logits and state alone. Nothing of the batch (slot, size, neighbours, arrival) enters it, so
rows that draw are worked one by one in float32, and only rows that need nothing but an argmax share a call.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from runtime_service.core.params import SamplingParams
from runtime_service.core.sampled import SampledToken, TokenLogprob
from shared.errors import InternalError

SEED_BITS = 64

_Floats = NDArray[np.float32]
_AnyFloats = NDArray[np.float32] | NDArray[np.float64]
_Ids = NDArray[np.int64]


@dataclass(slots=True, eq=False)
class SamplerState:
    """What one sequence carries from token to token: its generator and the tokens it has seen.

    `generated_counts` `[vocab]` and `prompt_seen` `[vocab]` are None unless a penalty needs them.
    """

    params: SamplingParams
    vocab_size: int
    generator: np.random.Generator
    end_ids: tuple[int, ...]
    min_tokens: int
    num_generated: int
    generated_counts: NDArray[np.int32] | None
    prompt_seen: NDArray[np.bool_] | None

    @classmethod
    def create(
        cls,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        *,
        vocab_size: int,
        sample_index: int = 0,
        end_ids: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> SamplerState:
        """State of sample `sample_index` of a request.

        `vocab_size` is the tokenizer's: ids from there on are padding of the logits and are never chosen. `end_ids` (end of text,
        stop ids) are not chosen either before `min_tokens` tokens exist. Padding among them, or in the prompt, changes nothing.
        """
        seed = secrets.randbits(SEED_BITS) if params.seed is None else params.seed
        # Philox takes its whole key, so equal seeds give equal draws and samples of one request differ.
        generator = np.random.Generator(np.random.Philox(key=np.array([seed, sample_index], dtype=np.uint64)))
        counts = seen = None
        if params.has_penalties:
            counts = np.zeros(vocab_size, dtype=np.int32)
            seen = np.zeros(vocab_size, dtype=np.bool_)
            seen[[token_id for token_id in prompt_ids if token_id < vocab_size]] = True
        choosable = tuple(token_id for token_id in end_ids if token_id < vocab_size)
        return cls(params, vocab_size, generator, choosable, min_tokens, 0, counts, seen)

    @property
    def needs_only_argmax(self) -> bool:
        return self.params.is_greedy and not self.params.has_penalties and not self.forbids_end and self.params.logprobs is None

    @property
    def forbids_end(self) -> bool:
        return bool(self.end_ids) and self.num_generated < self.min_tokens

    def record(self, token_id: int) -> None:
        """Count a chosen token."""
        self.num_generated += 1
        if self.generated_counts is not None:
            self.generated_counts[token_id] += 1


def sample(logits_BV: torch.Tensor, states: Sequence[SamplerState]) -> list[SampledToken | InternalError]:
    """One token for each row of float `logits_BV`, in order; states advance.

    A row without a finite maximum (NaN, +inf, or nothing left to choose) yields an InternalError in its place and leaves its
    state alone; other rows are not affected. Greedy rows take the lowest id among equal maxima.
    """
    if logits_BV.shape[0] != len(states):
        raise ValueError(f"one state a row: {logits_BV.shape[0]} rows of logits, {len(states)} states")
    results: list[SampledToken | InternalError | None] = [None] * len(states)
    plain = [row for row, state in enumerate(states) if state.needs_only_argmax]
    if plain:
        vocab_size = states[plain[0]].vocab_size
        assert all(states[row].vocab_size == vocab_size for row in plain), "rows of a batch share one tokenizer"
        for row, result in zip(plain, _argmax_rows(logits_BV[plain, :vocab_size]), strict=True):
            results[row] = result
    for row, state in enumerate(states):
        if results[row] is None:
            results[row] = _sample_row(logits_BV[row, : state.vocab_size].float().cpu().numpy(), state)
    chosen: list[SampledToken | InternalError] = []
    for state, outcome in zip(states, results, strict=True):
        assert outcome is not None
        if isinstance(outcome, SampledToken):
            state.record(outcome.token_id)
        chosen.append(outcome)
    return chosen


def no_maximum(maximum: float) -> InternalError:
    """What a row yields in the place of a token when the largest of its logits is `maximum`, which is not finite."""
    return InternalError(f"the model's logits need a finite maximum to sample from; got {maximum}")


def _argmax_rows(logits_RV: torch.Tensor) -> list[SampledToken | InternalError]:
    ids_R = logits_RV.argmax(dim=1, keepdim=True)
    # argmax takes NaN for the largest, so a NaN anywhere shows here.
    maxima_R = logits_RV.gather(1, ids_R).squeeze(1).tolist()
    return [
        SampledToken(token_id) if np.isfinite(maximum) else no_maximum(maximum)
        for token_id, maximum in zip(ids_R.squeeze(1).tolist(), maxima_R, strict=True)
    ]


def _sample_row(raw_V: _Floats, state: SamplerState) -> SampledToken | InternalError:
    params = state.params
    if not np.isfinite(raw_V.max()):  # numpy's max is NaN if any value is
        return no_maximum(float(raw_V.max()))
    logits_V: _AnyFloats = _penalise(raw_V, state) if params.has_penalties else raw_V
    if state.forbids_end:
        logits_V = logits_V.copy()
        logits_V[list(state.end_ids)] = -np.inf
    maximum = float(logits_V.max())
    if not np.isfinite(maximum):
        return no_maximum(maximum)  # every id left was forbidden
    token_id = int(logits_V.argmax()) if params.is_greedy else _draw((logits_V - maximum).astype(np.float32), state)
    if params.logprobs is None:
        return SampledToken(token_id)
    return _with_logprobs(token_id, raw_V, params.logprobs)


def _penalise(raw_V: _Floats, state: SamplerState) -> NDArray[np.float64]:
    """Repetition scales the logits of seen tokens away from choice; frequency and presence subtract for generated ones.

    In float64, where the smallest penalty and the largest float32 logit stay finite.
    """
    assert state.generated_counts is not None
    assert state.prompt_seen is not None
    params = state.params
    logits_V = raw_V.astype(np.float64)
    seen = np.flatnonzero(state.prompt_seen | (state.generated_counts > 0))
    factor = params.repetition_penalty
    logits_V[seen] = np.where(logits_V[seen] > 0, logits_V[seen] / factor, logits_V[seen] * factor)
    generated = np.flatnonzero(state.generated_counts)
    logits_V[generated] -= params.frequency_penalty * state.generated_counts[generated] + params.presence_penalty
    return logits_V


def _draw(shifted_V: _Floats, state: SamplerState) -> int:
    """Draw from logits whose maximum is 0: temperature, then top_k, top_p over what is left, min_p, one uniform number."""
    params = state.params
    with np.errstate(over="ignore", under="ignore"):  # a small temperature sends the others to -inf: probability 0, as meant
        weights_V = np.exp(shifted_V / np.float32(params.temperature))
    ids: _Ids = np.flatnonzero(weights_V)
    if 0 < params.top_k < len(ids):
        ids = ids[_best(weights_V[ids], params.top_k)]
    if params.top_p < 1.0:
        mass = np.cumsum(np.sort(weights_V[ids])[::-1], dtype=np.float64)
        ids = ids[_best(weights_V[ids], int(np.searchsorted(mass, params.top_p * mass[-1])) + 1)]
    if params.min_p > 0.0:
        ids = ids[weights_V[ids] >= params.min_p]  # the largest weight is 1
    mass = np.cumsum(weights_V[ids], dtype=np.float64)
    drawn = int(np.searchsorted(mass, state.generator.random() * mass[-1], side="right"))
    return int(ids[min(drawn, len(ids) - 1)])  # the product may round up to the whole mass


def _best(values: _Floats, count: int) -> _Ids:
    """Ascending indices of the `count` largest values; among equals at the edge the lower index is in."""
    if count >= len(values):
        return np.arange(len(values))
    edge = np.partition(values, len(values) - count)[len(values) - count]
    above = np.flatnonzero(values > edge)
    return np.sort(np.concatenate([above, np.flatnonzero(values == edge)[: count - len(above)]]))


def _with_logprobs(token_id: int, raw_V: _Floats, count: int) -> SampledToken:
    shifted_V = raw_V - raw_V.max()
    logprobs_V = shifted_V - np.log(np.exp(shifted_V).sum(dtype=np.float64)).astype(np.float32)
    top = _best(raw_V, count) if count else np.empty(0, dtype=np.int64)
    ranked = sorted(top.tolist(), key=lambda index: (-raw_V[index], index))
    return SampledToken(
        token_id,
        float(logprobs_V[token_id]),
        tuple(TokenLogprob(index, float(logprobs_V[index])) for index in ranked),
    )

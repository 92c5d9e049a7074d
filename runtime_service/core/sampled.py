"""One token chosen by the sampler, as it travels to the output of its request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithm of a token's probability under the model's own distribution (no temperature, filter or penalty)."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class SampledToken:
    """`logprob` is None and `top_logprobs` empty unless the request asked for them; the latter descends, ties by lower id."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()

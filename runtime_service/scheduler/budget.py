"""What fits: a request into an engine at all, a sequence into the free pages now, a chunk into one step. Pure arithmetic.

With compaction a sequence never holds more than budget + interval entries, so that, not its logical length, is what it must be
able to hold, and a prompt longer than the budget is prefilled in chunks with rounds between them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from runtime_service.core.request import GenerationRequest
from runtime_service.core.sequence import Sequence
from shared.errors import FieldOutOfRange, KVExhausted
from shared.kv_spec import KVCacheSpec
from shared.profiles import OptimizationProfile


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one loaded engine can hold. `num_pages` counts pages a sequence may own (the dump page is not one of them)."""

    spec: KVCacheSpec
    num_pages: int
    vocab_size: int
    max_position: int


def check_request(request: GenerationRequest, capacity: Capacity) -> None:
    """FieldOutOfRange or KVExhausted, with the numbers, for a request that can never run here; waiting would not help it."""
    _check_prompt(request, capacity)
    request.stop.check_vocabulary(capacity.vocab_size)
    _check_windows(request, capacity.spec)
    if request.max_physical > capacity.spec.max_len:
        raise FieldOutOfRange(
            f"{_needs(request)}; this engine holds {capacity.spec.max_len} a sequence. "
            "Ask for fewer tokens or for compaction with a smaller budget and interval",
            field="stopping.max_tokens",
        )
    pages = capacity.spec.pages_for(request.max_physical)
    if pages > capacity.num_pages:
        raise KVExhausted(
            f"{_needs(request)}, {pages} pages of {capacity.spec.page_size}; this pool has {capacity.num_pages}. "
            "Ask for fewer tokens or for compaction with a smaller budget and interval"
        )


def _needs(request: GenerationRequest) -> str:
    asked = f"a prompt of {len(request.prompt_ids)} tokens and max_tokens {request.stop.max_tokens}"
    if request.max_physical < request.max_entries:
        return f"{asked} need {request.max_physical} KV entries at once with this compaction"
    return f"{asked} need {request.max_entries} KV entries"


def _check_prompt(request: GenerationRequest, capacity: Capacity) -> None:
    prompt = request.prompt_ids
    if not prompt:
        raise FieldOutOfRange("prompt must have at least one token, got none", field="prompt")
    for token_id in (min(prompt), max(prompt)):
        if not 0 <= token_id < capacity.vocab_size:
            raise FieldOutOfRange(f"prompt ids must be 0..{capacity.vocab_size - 1}, got {token_id}", field="prompt")
    if request.max_entries > capacity.max_position:
        raise FieldOutOfRange(
            f"a prompt of {len(prompt)} tokens and max_tokens {request.stop.max_tokens} reach position {request.max_entries - 1}; "
            f"the model's last is {capacity.max_position - 1}",
            field="stopping.max_tokens",
        )


def _check_windows(request: GenerationRequest, spec: KVCacheSpec) -> None:
    """A round keeps the newest `window` entries of a sliding-window layer, so it must keep at least as many."""
    if request.compaction is None:
        return
    widest = max(spec.windows, default=0)
    if request.compaction.budget < widest:
        raise FieldOutOfRange(
            f"kv.policy.budget must be at least the sliding window of {widest} entries, got {request.compaction.budget}",
            field="kv.policy.budget",
        )


def pages_to_start(sequence: Sequence, spec: KVCacheSpec) -> int:
    """Pages that carry a sequence through the prefill of all it has, so that no other can take them in the middle."""
    return spec.pages_for(min(sequence.logical_len, sequence.request.max_physical))


def pages_to_grow(running: Iterable[Sequence], spec: KVCacheSpec) -> int:
    """One page for every running sequence that will want more: left free at admission, or it would preempt right away."""
    return sum(len(s.pages) < spec.pages_for(s.request.max_physical) for s in running)


def chunk_len(sequence: Sequence, profile: OptimizationProfile) -> int:
    """Tokens of `sequence` one step of `profile` may compute: what is known, what the engine takes, what fits before a round."""
    longest = min(sequence.remaining, profile.query_len.max)
    return longest if sequence.room is None else min(longest, sequence.room)

"""Wire messages <-> the runtime's own values. No decisions but defaults and the caps of the wire."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from google.protobuf.duration_pb2 import Duration

from runtime_service.core.params import CompactionParams, SamplingParams, StopParams
from runtime_service.core.sampled import SampledToken
from runtime_service.streaming.events import Event, Failure, Finished, FinishReason, TokenDelta, Usage
from shared.errors import FieldOutOfRange
from shared.kernels.compaction.modes import Mode
from shared.pb.quire.v1 import common_pb2, control_pb2, inference_pb2
from shared.rpc.status import to_message

DEFAULT_MAX_TOKENS = 16
MAX_CACHE_SALT_BYTES = 256
MAX_ABS_PRIORITY = 1000

_REASONS = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: inference_pb2.FINISH_REASON_CANCELLED,
}

_MODES = {
    common_pb2.COMPACTION_MODE_ORDERED: Mode.ORDERED,
    common_pb2.COMPACTION_MODE_HOLE_FILLING: Mode.HOLE_FILLING,
}


def sampling_params(message: inference_pb2.Sampling) -> SamplingParams:
    """Unset fields take the defaults of SamplingParams, which are the proto's."""
    given: dict[str, Any] = {field.name: value for field, value in message.ListFields()}
    return SamplingParams(**given)


def stop_params(message: inference_pb2.Stopping, max_generated_tokens: int) -> StopParams:
    """FieldOutOfRange above the server's `max_generated_tokens`; unset, DEFAULT_MAX_TOKENS or as many as there may be."""
    max_tokens = message.max_tokens if message.HasField("max_tokens") else min(DEFAULT_MAX_TOKENS, max_generated_tokens)
    if max_tokens > max_generated_tokens:
        raise FieldOutOfRange(
            f"stopping.max_tokens must be at most {max_generated_tokens} on this server; got {max_tokens}",
            field="stopping.max_tokens",
        )
    return StopParams(max_tokens, message.min_tokens, tuple(message.stop), tuple(message.stop_token_ids), message.ignore_eos)


def compaction_params(message: inference_pb2.KVOptions, default: CompactionParams | None) -> CompactionParams | None:
    """What a request chose; `default` is its engine's."""
    if message.HasField("policy"):
        return _compaction(message.policy)
    return None if message.off else default


def default_compaction(message: control_pb2.CompactionDefaults) -> CompactionParams:
    with of_load_request():
        return _compaction(message)


@contextmanager
def of_load_request() -> Iterator[None]:
    """Refusals of a compaction policy name its fields as they are in a LoadEngineRequest."""
    try:
        yield
    except FieldOutOfRange as error:
        message, field = (text.replace("kv.policy", "default_compaction", 1) for text in (error.message, error.field))
        raise FieldOutOfRange(message, field=field, details=error.details) from error


def _compaction(message: inference_pb2.CompactionOptions | control_pb2.CompactionDefaults) -> CompactionParams:
    chosen: dict[str, Any] = {"sinks": message.sinks} if message.HasField("sinks") else {}
    if message.mode:
        if message.mode not in _MODES:
            known = " or ".join(_MODES.values())
            raise FieldOutOfRange(
                f"kv.policy.mode must be {known}, {' or '.join(map(str, _MODES))}; got {message.mode}", field="kv.policy.mode"
            )
        chosen["mode"] = _MODES[message.mode]
    return CompactionParams(message.name, message.budget, message.interval, **chosen)


def compaction_message(params: CompactionParams) -> control_pb2.CompactionDefaults:
    """Every field set, defaults too."""
    (mode,) = (wire for wire, mode in _MODES.items() if mode is params.mode)
    return control_pb2.CompactionDefaults(
        name=params.policy, budget=params.budget, interval=params.interval, sinks=params.sinks, mode=mode
    )


def cache_salt(message: inference_pb2.KVOptions) -> str:
    """FieldOutOfRange above MAX_CACHE_SALT_BYTES."""
    size = len(message.cache_salt.encode())
    if size > MAX_CACHE_SALT_BYTES:
        raise FieldOutOfRange(f"kv.cache_salt must be at most {MAX_CACHE_SALT_BYTES} bytes; got {size}", field="kv.cache_salt")
    return message.cache_salt


def priority(message: inference_pb2.GenerateRequest) -> int:
    """FieldOutOfRange beyond MAX_ABS_PRIORITY on either side of zero."""
    if abs(message.priority) > MAX_ABS_PRIORITY:
        raise FieldOutOfRange(
            f"priority must be {-MAX_ABS_PRIORITY} to {MAX_ABS_PRIORITY}; got {message.priority}", field="priority"
        )
    return message.priority


def seconds(message: Duration, field: str, cap: float) -> float:
    """A duration above 0, `cap` at most."""
    value = message.ToNanoseconds() / 1e9
    if value <= 0:
        raise FieldOutOfRange(f"{field} must be longer than 0 s; got {value:g} s", field=field)
    return min(value, cap)


def grace_seconds(message: Duration, field: str, cap: float) -> float:
    """A wait of 0 (unset) to `cap`."""
    value = message.ToNanoseconds() / 1e9
    if not 0 <= value <= cap:
        raise FieldOutOfRange(f"{field} must be 0 to {cap:g} s; got {value:g} s", field=field)
    return value


def response(event: Event) -> inference_pb2.GenerateResponse:
    """One message of a stream; an error in the stream travels in it, not as the call's status."""
    match event:
        case TokenDelta():
            return inference_pb2.GenerateResponse(delta=_delta(event))
        case Finished():
            return inference_pb2.GenerateResponse(finished=_finished(event))
        case Usage():
            return inference_pb2.GenerateResponse(usage=_usage(event))
        case Failure():
            return inference_pb2.GenerateResponse(error=to_message(event.error))


def _delta(event: TokenDelta) -> inference_pb2.TokenDelta:
    return inference_pb2.TokenDelta(
        index=event.index,
        token_ids=[token.token_id for token in event.tokens],
        text=event.text,
        logprobs=[_logprobs(token, token.logprob) for token in event.tokens if token.logprob is not None],
    )


def _logprobs(token: SampledToken, logprob: float) -> inference_pb2.TokenLogprobs:
    top = [inference_pb2.TopLogprob(token_id=entry.token_id, logprob=entry.logprob) for entry in token.top_logprobs]
    return inference_pb2.TokenLogprobs(logprob=logprob, top=top)


def _finished(event: Finished) -> inference_pb2.Finished:
    message = inference_pb2.Finished(index=event.index, reason=_REASONS[event.reason])
    if isinstance(event.match, str):
        message.stop = event.match
    elif event.match is not None:
        message.stop_token_id = event.match
    return message


def _usage(event: Usage) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=event.prompt_tokens,
        generated_tokens=event.generated_tokens,
        cached_tokens=event.cached_tokens,
        compaction_rounds=event.compaction_rounds,
        tokens_evicted=event.tokens_evicted,
        pages_freed=event.pages_freed,
        physical_length=event.physical_length,
        peak_pages=event.peak_pages,
        preemptions=event.preemptions,
        queue_s=event.queue_s,
        time_to_first_token_s=event.time_to_first_token_s,
        generate_s=event.generate_s,
        rows_moved=event.rows_moved,
        bytes_moved=event.bytes_moved,
        compaction_s=event.compaction_s,
    )

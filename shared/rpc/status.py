"""Error class <-> gRPC status, in one table. Nothing else in Quire names a transport code.

A failed call carries google.rpc.Status with ErrorInfo (reason, domain, metadata), BadRequest where one field is at fault and
RetryInfo where waiting helps. A failure inside a stream or a job travels as quire.v1.Error with the same facts.
"""

from __future__ import annotations

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from shared import errors
from shared.errors import QuireError
from shared.pb.quire.v1 import common_pb2
from shared.text import clip

DOMAIN = "quire"
DEFAULT_RETRY_AFTER_S = 1.0

# Most derived class first where one contains another; the first match by inheritance wins.
CODES: dict[type[QuireError], grpc.StatusCode] = {
    errors.MessageTooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.InvalidInput: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.DuplicateRequest: grpc.StatusCode.ALREADY_EXISTS,
    errors.Conflict: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Refused: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Exhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.TimedOut: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.ReaderStalled: grpc.StatusCode.ABORTED,
    errors.TokenInvalid: grpc.StatusCode.UNAUTHENTICATED,
    errors.Denied: grpc.StatusCode.PERMISSION_DENIED,
    errors.ArtifactCorrupt: grpc.StatusCode.DATA_LOSS,
    errors.InternalError: grpc.StatusCode.INTERNAL,
}


def code_of(kind: type[QuireError]) -> grpc.StatusCode:
    """The status of an error class; KeyError for a class nobody placed in the table."""
    for parent in kind.__mro__:
        if parent in CODES:
            return CODES[parent]
    raise KeyError(kind)


def _pack(message: error_details_pb2.ErrorInfo | error_details_pb2.BadRequest | error_details_pb2.RetryInfo) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def to_status(error: QuireError) -> status_pb2.Status:
    """google.rpc.Status with every detail the class and the instance carry."""
    metadata = {clip(k): clip(v) for k, v in error.details.items()}
    details = [_pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=metadata))]
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=clip(error.field), description=clip(error.message))
        details.append(_pack(error_details_pb2.BadRequest(field_violations=[violation])))
    if error.retryable:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(round((error.retry_after_s or DEFAULT_RETRY_AFTER_S) * 1e9))
        details.append(_pack(retry))
    code: int = code_of(type(error)).value[0]
    return status_pb2.Status(code=code, message=clip(error.message), details=details)


def to_message(error: QuireError) -> common_pb2.Error:
    """The same facts as a message inside a stream."""
    return common_pb2.Error(
        code=code_of(type(error)).value[0],
        reason=error.reason,
        message=clip(error.message),
        retryable=error.retryable,
        metadata={clip(k): clip(v) for k, v in error.details.items()},
        field=clip(error.field),
    )


def _classes(kind: type[QuireError]) -> list[type[QuireError]]:
    return [kind, *(c for child in kind.__subclasses__() for c in _classes(child))]


def error_class(reason: str) -> type[QuireError]:
    """The class that carries `reason`; InternalError for one this build does not know."""
    by_reason = {c.reason: c for c in _classes(QuireError)[1:]}
    return by_reason.get(reason, errors.InternalError)


def from_message(message: common_pb2.Error) -> QuireError:
    """A client-side exception of the class that the server raised."""
    return error_class(message.reason)(message.message, field=message.field, details=dict(message.metadata))


def from_rpc_error(error: grpc.RpcError) -> QuireError:
    """A client-side exception from a failed call, whoever failed it (server, transport, deadline)."""
    status = rpc_status.from_call(error)
    if status is None:
        return _from_transport(error)
    info, field, retry_after_s = error_details_pb2.ErrorInfo(), "", None
    for detail in status.details:
        bad, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
        elif detail.Is(bad.DESCRIPTOR):
            detail.Unpack(bad)
            field = bad.field_violations[0].field if bad.field_violations else ""
        elif detail.Is(retry.DESCRIPTOR):
            detail.Unpack(retry)
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    if not info.reason:
        return _from_transport(error)
    kind = error_class(info.reason)
    return kind(status.message, field=field, retry_after_s=retry_after_s, details=dict(info.metadata))


def _from_transport(error: grpc.RpcError) -> QuireError:
    """Failures that no Quire server worded: the transport's own."""
    code, text = error.code(), error.details() or str(error.code())
    kinds: dict[grpc.StatusCode, type[QuireError]] = {
        grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
        grpc.StatusCode.DEADLINE_EXCEEDED: errors.TimedOut,
        grpc.StatusCode.CANCELLED: errors.Cancelled,
        grpc.StatusCode.RESOURCE_EXHAUSTED: errors.MessageTooLarge,
        grpc.StatusCode.UNAUTHENTICATED: errors.TokenInvalid,
        grpc.StatusCode.PERMISSION_DENIED: errors.Denied,
    }
    return kinds.get(code, errors.InternalError)(text)

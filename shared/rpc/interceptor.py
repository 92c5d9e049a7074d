"""The one place where exceptions become statuses, and where every call of ours is logged once."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
import structlog
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from shared.errors import FieldOutOfRange, InternalError, QuireError
from shared.ids import new_id
from shared.panics import NOT_ERRORS
from shared.rpc.status import to_status

_OURS = "/quire.v1."
CallObserver = Callable[[str, str], None]
"""Told of every call of ours that has ended: `/package.Service/Method`, and `OK` or the reason it failed for."""
Unary = Callable[[Any, grpc.aio.ServicerContext], Awaitable[Any]]
Streaming = Callable[[Any, grpc.aio.ServicerContext], AsyncIterator[Any]]
Report = Callable[[float, str], None]


def internal_error(cause: BaseException) -> InternalError:
    """What a client is told of a bug: an incident id that stands in the log beside the traceback, never the traceback."""
    incident = new_id()[:12]
    structlog.get_logger(__name__).error("internal_error", incident=incident, exc_info=cause)
    return InternalError(f"internal error, incident {incident}; the server's log has the cause", details={"incident": incident})


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Wraps unary and server-streaming methods of `quire.v1`; other services (health, reflection) pass unchanged."""

    def __init__(self, on_call: CallObserver | None = None) -> None:
        self._on_call = on_call

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(_OURS):
            return handler
        # Requests reach the guard as bytes: what cannot be parsed is the caller's error too, and grpc would call it UNKNOWN.
        parse, codec = _parser(handler.request_deserializer), {"response_serializer": handler.response_serializer}
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(_guard_stream(handler.unary_stream, parse, self._report(method)), **codec)
        return grpc.unary_unary_rpc_method_handler(_guard_unary(handler.unary_unary, parse, self._report(method)), **codec)

    def _report(self, method: str) -> Report:
        def report(started: float, outcome: str) -> None:
            seconds = round(time.monotonic() - started, 4)
            structlog.get_logger(__name__).info("call", method=method, outcome=outcome, seconds=seconds)
            if self._on_call is not None:
                self._on_call(method, outcome)

        return report


def _parser(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            raise FieldOutOfRange(f"the request is no message of this method: {error}; is a text field valid UTF-8?") from error

    return parse


def _guard_unary(call: Unary, parse: Callable[[bytes], Any], report: Report) -> Unary:
    async def guarded(data: bytes, context: grpc.aio.ServicerContext) -> Any:
        started = time.monotonic()
        try:
            response = await call(parse(data), context)
        except NOT_ERRORS:
            raise
        except BaseException as error:  # noqa: BLE001 - the boundary: whatever it is, a library's panic too, becomes a status
            await _abort(error, context, started, report)
        report(started, "OK")
        return response

    return guarded


def _guard_stream(call: Streaming, parse: Callable[[bytes], Any], report: Report) -> Streaming:
    async def guarded(data: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        started, is_reported = time.monotonic(), False

        def report_once(started: float, outcome: str) -> None:
            nonlocal is_reported
            if not is_reported:
                is_reported = True
                report(started, outcome)

        # grpc.aio abandons the generator of a call that ends while a write is under way; this it always calls.
        context.add_done_callback(lambda _: report_once(started, "CANCELLED"))
        try:
            async for response in call(parse(data), context):
                yield response
        except NOT_ERRORS:
            raise
        except BaseException as error:  # noqa: BLE001 - the boundary: whatever it is, a library's panic too, becomes a status
            await _abort(error, context, started, report_once)
        report_once(started, "OK")

    return guarded


async def _abort(error: BaseException, context: grpc.aio.ServicerContext, started: float, report: Report) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    known = error if isinstance(error, QuireError) else internal_error(error)
    report(started, known.reason)
    await context.abort_with_status(rpc_status.to_status(to_status(known)))
    raise AssertionError("abort_with_status returns never")

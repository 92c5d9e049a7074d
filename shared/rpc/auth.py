"""Bearer tokens with scopes.

A token file is JSON:

    {"tokens": [{"name": "ci", "sha256": "<hex of sha256(token)>", "scopes": ["infer"], "expires_at": 1830000000}]}

It holds digests only; `expires_at` (Unix seconds) may be null. Health and reflection need no token.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

import grpc
from pydantic import ConfigDict, TypeAdapter, ValidationError

from shared.errors import FieldOutOfRange, ScopeMissing, TokenInvalid
from shared.ids import is_digest


class Scope(StrEnum):
    INFER = "infer"
    CONTROL = "control"
    COMPILE = "compile"
    ADMIN = "admin"
    """Everything, and alone what cannot be undone: deleting artifacts or replacing their signatures, draining a runtime."""


_BY_METHOD = {
    "/quire.v1.Compiler/DeleteArtifact": Scope.ADMIN,
    "/quire.v1.Compiler/SignArtifact": Scope.ADMIN,
    "/quire.v1.Compiler/CollectGarbage": Scope.ADMIN,
    "/quire.v1.Control/Drain": Scope.ADMIN,
}
_BY_SERVICE = {
    "/quire.v1.Compiler": Scope.COMPILE,
    "/quire.v1.Control": Scope.CONTROL,
    "/quire.v1.Inference": Scope.INFER,
}


def scope_of(method: str) -> Scope | None:
    """Scope that `/package.Service/Method` needs; None where no token is needed; a method of ours nobody placed needs admin."""
    if not method.startswith("/quire.v1."):
        return None
    return _BY_METHOD.get(method) or _BY_SERVICE.get(method.rpartition("/")[0], Scope.ADMIN)


@dataclass(frozen=True, slots=True)
class Token:
    name: str
    sha256: str
    scopes: tuple[Scope, ...]
    expires_at: float | None = None

    def __post_init__(self) -> None:
        if not is_digest(self.sha256.lower()) or not self.name or not self.scopes:
            raise ValueError("a token needs a name, 64 hex digits of sha256 and at least one scope")


@dataclass(frozen=True, slots=True)
class TokenFile:
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    tokens: tuple[Token, ...]


def read_tokens(path: Path) -> tuple[Token, ...]:
    """Tokens of a file as in the module's docstring; FieldOutOfRange says what is wrong with another one."""
    try:
        return TypeAdapter(TokenFile).validate_json(path.read_bytes()).tokens
    except (OSError, ValidationError) as error:
        raise FieldOutOfRange(f"{path} must be a token file (see shared/rpc/auth.py): {error}", field="tokens") from error


def authorise(tokens: tuple[Token, ...], header: str | None, method: str, now: float) -> str:
    """Name of the token that may call `method`. Every digest is compared, in constant time, whichever matches.

    TokenInvalid for a missing, unknown or expired token; ScopeMissing for one without the method's scope.
    """
    scheme, _, secret = (header or "").partition(" ")
    if scheme.lower() != "bearer" or not secret:
        raise TokenInvalid("this server needs a token: send the metadata `authorization: Bearer <token>`")
    digest = hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()
    found = None
    for token in tokens:
        if hmac.compare_digest(token.sha256.lower(), digest):
            found = token
    if found is None or (found.expires_at is not None and found.expires_at <= now):
        raise TokenInvalid("the token is unknown or expired; ask the operator for a new one")
    scope = scope_of(method)
    if scope not in found.scopes and Scope.ADMIN not in found.scopes:
        raise ScopeMissing(f"{method} needs the scope {scope}; token {found.name!r} has {', '.join(found.scopes)}")
    return found.name


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Checks the token inside the call, so that a refusal passes through the error interceptor like any other error."""

    def __init__(self, tokens: tuple[Token, ...], clock: Callable[[], float] = time.time) -> None:
        self._tokens, self._clock = tokens, clock

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or scope_of(method) is None:
            return handler
        metadata = dict(handler_call_details.invocation_metadata)
        header = metadata.get("authorization")

        def check() -> None:
            authorise(self._tokens, header, method, self._clock())

        codec = {"request_deserializer": handler.request_deserializer, "response_serializer": handler.response_serializer}
        if handler.response_streaming:

            async def stream(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
                check()
                async for response in handler.unary_stream(request, context):
                    yield response

            return grpc.unary_stream_rpc_method_handler(stream, **codec)

        async def unary(request: Any, context: grpc.aio.ServicerContext) -> Any:
            check()
            return await handler.unary_unary(request, context)

        return grpc.unary_unary_rpc_method_handler(unary, **codec)

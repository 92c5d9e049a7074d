"""Client channels: TLS, tokens and keepalive set once, to match the server's rules."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from shared.errors import FieldOutOfRange
from shared.rpc.server import KEEPALIVE_TIME_MS, MAX_MESSAGE_BYTES, is_loopback


@dataclass(frozen=True, slots=True)
class ChannelOptions:
    """`ca` turns TLS on (PEM roots); `certificate` and `key` identify the client (mTLS); `token` is sent as a bearer token."""

    address: str
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    token: str | None = None


def connect(options: ChannelOptions) -> grpc.Channel:
    """A blocking channel. FieldOutOfRange for a token beyond loopback without TLS and for PEM files that cannot be read."""
    settings: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 0),
        ("grpc.lb_policy_name", "round_robin"),  # a name with several addresses: calls take turns, none is left idle
    ]
    if options.ca is None:
        if options.token and not is_loopback(options.address):
            raise FieldOutOfRange(f"a token is sent over TLS only; give --ca for {options.address}", field="--token")
        channel = grpc.insecure_channel(options.address, settings)
    else:
        channel = grpc.secure_channel(options.address, _credentials(options, options.ca), settings)
    if options.token is None:
        return channel
    return grpc.intercept_channel(channel, _BearerToken(options.token))


def _credentials(options: ChannelOptions, ca: Path) -> grpc.ChannelCredentials:
    if (options.key is None) != (options.certificate is None):
        raise FieldOutOfRange("a client certificate and its key go together: give both or none", field="--certificate")
    key = _read(options.key, "--key") if options.key else None
    certificate = _read(options.certificate, "--certificate") if options.certificate else None
    return grpc.ssl_channel_credentials(_read(ca, "--ca"), key, certificate)


def _read(path: Path, field: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise FieldOutOfRange(f"{field} must be a readable PEM file: {error}", field=field) from error


class _CallDetails(grpc.ClientCallDetails):
    """The call's own details with other metadata."""

    def __init__(self, details: grpc.ClientCallDetails, metadata: list[tuple[str, str]]) -> None:
        self.method, self.timeout, self.credentials = details.method, details.timeout, details.credentials
        self.wait_for_ready, self.compression, self.metadata = details.wait_for_ready, details.compression, metadata


class _BearerToken(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Adds `authorization: Bearer ...`; call credentials would do but gRPC refuses them on plaintext loopback."""

    def __init__(self, token: str) -> None:
        self._header = ("authorization", f"Bearer {token}")

    def _with_token(self, details: grpc.ClientCallDetails) -> grpc.ClientCallDetails:
        return _CallDetails(details, [*(details.metadata or ()), self._header])

    def intercept_unary_unary(self, continuation: Any, client_call_details: grpc.ClientCallDetails, request: Any) -> Any:
        return continuation(self._with_token(client_call_details), request)

    def intercept_unary_stream(self, continuation: Any, client_call_details: grpc.ClientCallDetails, request: Any) -> Any:
        return continuation(self._with_token(client_call_details), request)

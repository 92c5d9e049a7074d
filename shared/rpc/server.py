"""A grpc.aio server with health, optional reflection, TLS and a graceful end; both services are made of this."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import ssl
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from shared.errors import FieldOutOfRange
from shared.rpc.interceptor import CallObserver, ErrorInterceptor

OVERALL, LIVENESS, READINESS = "", "liveness", "readiness"
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
KEEPALIVE_TIME_MS = 30_000
"""Clients may ping this often, also without a call (shared/rpc/channel.py pings at this interval; a test compares the two)."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. With `client_ca` every client must show a certificate signed by it (mTLS)."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def credentials(self) -> grpc.ServerCredentials:
        """FieldOutOfRange for files that cannot be read, are none, or do not belong together: gRPC would only say that it could not
        listen."""
        try:
            root = self.client_ca.read_bytes() if self.client_ca else None
            pair = (self.key.read_bytes(), self.certificate.read_bytes())
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.certificate, self.key, password="")  # or it asks a terminal for that of an encrypted key
            if self.client_ca:
                context.load_verify_locations(self.client_ca)
        except OSError as error:  # ssl's errors are such
            raise FieldOutOfRange(
                f"TLS needs a certificate, its unencrypted key and, if given, the clients' CA as PEM files: {error}",
                field="tls_certificate",
            ) from error
        return grpc.ssl_server_credentials([pair], root_certificates=root, require_client_auth=root is not None)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """`address` is host:port; port 0 lets the system choose. Plaintext on anything but loopback needs `allow_plaintext`.

    `health_address` serves grpc.health.v1 and nothing else in plaintext, for probes that cannot speak TLS (Kubernetes').

    A connection older than `max_connection_age_s` takes no new calls, so clients come to balance anew; `longest_call_s` later it is
    closed under the calls that are left. That alone ends a call whose client lives and reads nothing: whatever the server has to
    say, a status too, waits behind what is not read.
    """

    address: str
    health_address: str | None = None
    tls: TlsFiles | None = None
    allow_plaintext: bool = False
    reflection: bool = False
    max_connection_age_s: float = 1800.0
    longest_call_s: float = 3600.0

    def __post_init__(self) -> None:
        check_exposure(self.address, on_purpose=self.tls is not None or self.allow_plaintext, field="address")


def check_exposure(address: str, *, on_purpose: bool, field: str) -> None:
    """FieldOutOfRange for an address beyond this machine that nobody has said should be reached."""
    if not on_purpose and not is_loopback(address):
        raise FieldOutOfRange(
            f"{address} is not a loopback host:port: give a TLS certificate and key (QUIRE_*_TLS_CERTIFICATE, QUIRE_*_TLS_KEY), "
            "or allow plaintext explicitly (QUIRE_*_ALLOW_PLAINTEXT=true)",
            field=field,
        )


def is_loopback(address: str) -> bool:
    """Whether host:port (or unix:path) is reachable from this machine only."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Server:
    """Owns the grpc.aio server and its health. Add servicers to `.grpc`, then `await start()`; `stop()` is idempotent."""

    def __init__(
        self,
        options: ServerOptions,
        service_names: Sequence[str],
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        on_call: CallObserver | None = None,
    ) -> None:
        self._options = options
        self._names = tuple(service_names)
        self._stopping = False
        self.health = health.aio.HealthServicer()
        self.grpc = grpc.aio.server(
            interceptors=[ErrorInterceptor(on_call), *interceptors],
            options=[
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
                ("grpc.http2.max_ping_strikes", 0),
                ("grpc.max_connection_age_ms", int(options.max_connection_age_s * 1000)),
                ("grpc.max_connection_age_grace_ms", int(options.longest_call_s * 1000)),
            ],
        )
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.grpc)
        self._probes = grpc.aio.server() if options.health_address else None
        if self._probes is not None:
            health_pb2_grpc.add_HealthServicer_to_server(self.health, self._probes)
        if options.reflection:
            reflection.enable_server_reflection((*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), self.grpc)

    async def start(self) -> str:
        """Bind and serve; returns host:port with the real port. Liveness is SERVING at once, readiness when `set_ready` says so."""
        credentials = self._options.tls.credentials() if self._options.tls else None
        port = _listen(self.grpc, self._options.address, credentials)
        if self._probes is not None:
            _listen(self._probes, str(self._options.health_address), None)
            await self._probes.start()
        await self.grpc.start()
        await self._set(LIVENESS, serving=True)
        await self.set_ready(False)
        if self._options.address.startswith("unix:"):
            return self._options.address
        return f"{self._options.address.rpartition(':')[0]}:{port}"

    async def set_ready(self, ready: bool) -> None:
        for name in (OVERALL, READINESS, *self._names):
            await self._set(name, serving=ready)

    async def set_live(self, live: bool) -> None:
        await self._set(LIVENESS, serving=live)

    async def _set(self, name: str, *, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        await self.health.set(name, status.SERVING if serving else status.NOT_SERVING)

    async def begin_shutdown(self) -> None:
        """Readiness NOT_SERVING for good: later `set_ready(True)` changes nothing."""
        await self.health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """Stop accepting, let running calls finish for `grace_s`, then cancel them."""
        if self._stopping:
            return
        self._stopping = True
        await self.begin_shutdown()
        await self.grpc.stop(grace_s)
        if self._probes is not None:
            await self._probes.stop(0)


def _listen(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    """The port `server` listens on; FieldOutOfRange where it cannot."""
    try:
        port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError as error:
        raise FieldOutOfRange(
            f"cannot listen on {address}: it is in use, or not an address of this host; stop what serves there or choose another",
            field="address",
        ) from error
    return int(port)


@contextlib.asynccontextmanager
async def stop_signals() -> AsyncIterator[asyncio.Event]:
    """An event that SIGTERM or SIGINT sets, instead of killing the process."""
    event, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, event.set)
    try:
        yield event
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

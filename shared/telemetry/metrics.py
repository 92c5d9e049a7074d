"""What a service shows to Prometheus: one registry, served over HTTP on an address of its own.

Names are `quire_<service>_*` in base units. Labels are bounded: engines that are loaded, methods of our protos, reasons of
shared/errors.py, states of an enum. No label carries what a caller made up.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from importlib.metadata import version
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, Counter, Info, ProcessCollector, make_wsgi_app

from shared.errors import FieldOutOfRange

IDLE_S = 10.0
"""A connection that says nothing for so long is closed: each has a thread."""


class ServiceMetrics:
    """The registry of one service, with what both have: process figures, the version, and the outcome of every call."""

    def __init__(self, service: str) -> None:
        self.prefix = f"quire_{service}"
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        Info(f"{self.prefix}_build", "Version of this service.", registry=self.registry).info({"version": version("quire")})
        self._calls = Counter(
            f"{self.prefix}_calls",
            "gRPC calls that have ended; outcome is OK or the reason.",
            ["method", "outcome"],
            registry=self.registry,
        )

    def note_call(self, method: str, outcome: str) -> None:
        """A call of `/package.Service/Method` has ended: `OK`, or the reason it failed for."""
        self._calls.labels(method.rpartition("/")[2], outcome).inc()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)


class _Handler(WSGIRequestHandler):
    timeout = IDLE_S

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not worth a line."""


class MetricsEndpoint:
    """Serves a registry at `http://host:port/metrics`, on threads of its own. `address` has the real port once started."""

    def __init__(self, address: str, registry: CollectorRegistry) -> None:
        self.address = address
        self._registry = registry
        self._running: tuple[WSGIServer, threading.Thread] | None = None

    def start(self) -> str:
        """FieldOutOfRange where the address is none, or taken."""
        host, port = _host_and_port(self.address)
        try:
            server = _Server((host, port), _Handler)
        except OSError as error:
            raise FieldOutOfRange(
                f"cannot serve metrics on {self.address}: {error}; is it in use?", field="metrics_address"
            ) from error
        server.set_app(make_wsgi_app(self._registry))
        thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
        thread.start()
        self._running = server, thread
        self.address = f"{self.address.rpartition(':')[0]}:{server.server_port}"
        return self.address

    def stop(self) -> None:
        """Idempotent."""
        running, self._running = self._running, None
        if running is not None:
            server, thread = running
            server.shutdown()
            server.server_close()
            thread.join()


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        number = int(port)
        if host != "localhost":
            ipaddress.ip_address(host)
        if not 0 <= number < 1 << 16:
            raise ValueError(f"port {number}")
    except ValueError as error:
        raise FieldOutOfRange(f"metrics_address must be ip:port; got {address!r}", field="metrics_address") from error
    return host, number

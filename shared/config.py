"""Settings both services share. Each service extends this class with its own, read from `QUIRE_<SERVICE>_*` variables.

Resolved once, in the service's `__main__`; nothing else reads the environment.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Self

from prometheus_client import CollectorRegistry
from pydantic import Field, model_validator
from pydantic_settings import BaseSettings

from shared.artifacts.locate import StoreLocation
from shared.rpc.auth import AuthInterceptor, read_tokens
from shared.rpc.server import ServerOptions, TlsFiles, check_exposure
from shared.telemetry.metrics import MetricsEndpoint


def split_paths(value: Any) -> Any:
    """A variable that lists paths as PATH does; what is no text passes."""
    return tuple(value.split(os.pathsep)) if isinstance(value, str) else value


class ServiceSettings(BaseSettings):
    """`data` is read from QUIRE_DATA, since both services must agree on it; every other field has the service's own prefix."""

    data: Path = Field(default=Path("~/.local/share/quire"), validation_alias="QUIRE_DATA")
    store: str = ""
    """Where artifacts are: `s3://bucket/prefix` or a directory; empty = `artifacts` in `data`. Both services must name the same."""
    store_cache_bytes: int = Field(default=64 << 30, ge=0)
    """What this host keeps of a bucket at most, beside what it has open."""
    address: str
    health_address: str | None = None
    """host:port that answers grpc.health.v1 alone, in plaintext, for probes."""
    metrics_address: str | None = None
    """ip:port that serves Prometheus metrics over HTTP. Figures alone, in plaintext; beyond this machine only where the service
    itself may be reached from there: with TLS, or with plaintext allowed."""
    otlp_endpoint: str | None = None
    """http://host:port of an OpenTelemetry collector (OTLP over gRPC) that gets spans. Needs the extra `otel`."""
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    tokens: Path | None = None
    """Token file of shared/rpc/auth.py; without it every caller may do everything."""
    allow_plaintext: bool = False
    """Serve without TLS on an address that is not loopback."""
    reflection: bool = False
    max_connection_age_s: float = Field(default=1800.0, ge=1, le=86400)
    """A connection older than this takes no new calls: clients connect anew, and to other replicas. Calls under way may last
    as long as the longest there is; then the connection is closed, also under a client that reads nothing."""
    log_level: str = "info"
    drain_s: float = Field(default=30.0, ge=0)
    """Longest time running calls get after SIGTERM."""

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key go together: give both or none")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ValueError("tls_client_ca needs tls_certificate and tls_key")
        return self

    @property
    def data_directory(self) -> Path:
        return self.data.expanduser().resolve()

    @property
    def store_location(self) -> StoreLocation:
        """A directory as an absolute path: build processes work elsewhere."""
        data = self.data_directory
        place = self.store or str(data / "artifacts")
        if "://" not in place:
            place = str(Path(place).expanduser().resolve())
        return StoreLocation(place, str(data / "artifact-cache"), self.store_cache_bytes)

    @property
    def server_options(self) -> ServerOptions:
        """FieldOutOfRange where the address would be served in plaintext beyond this machine."""
        tls = None
        if self.tls_certificate is not None and self.tls_key is not None:
            tls = TlsFiles(self.tls_certificate, self.tls_key, self.tls_client_ca)
        return ServerOptions(
            self.address,
            self.health_address,
            tls,
            self.allow_plaintext,
            self.reflection,
            self.max_connection_age_s,
            self.longest_call_s,
        )

    @property
    def longest_call_s(self) -> float:
        """No call need last longer: a watch of a job may be resumed."""
        return 3600.0

    def metrics_endpoint(self, registry: CollectorRegistry) -> MetricsEndpoint | None:
        """What serves `registry`, where an address is set. FieldOutOfRange for one that must not be opened."""
        if self.metrics_address is None:
            return None
        on_purpose = self.tls_certificate is not None or self.allow_plaintext
        check_exposure(self.metrics_address, on_purpose=on_purpose, field="metrics_address")
        return MetricsEndpoint(self.metrics_address, registry)

    @property
    def interceptors(self) -> list[AuthInterceptor]:
        return [AuthInterceptor(read_tokens(self.tokens))] if self.tokens is not None else []

"""Settings of the runtime service, from QUIRE_RUNTIME_* environment variables."""

from __future__ import annotations

from pathlib import Path

from pydantic import AliasChoices, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

PREFIX = "QUIRE_RUNTIME_"


class RuntimeSettings(BaseSettings):
    """Every cap has a default; times are seconds. An unknown or bad value is a pydantic ValidationError naming the variable."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", populate_by_name=True)

    address: str = "127.0.0.1:50062"
    data: Path = Field(
        default=Path("~/.local/share/quire"),
        validation_alias=AliasChoices(f"{PREFIX}DATA", "QUIRE_DATA"),
        description="state lives here",
    )
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    allow_plaintext: bool = False
    """Serve other than loopback addresses without TLS."""
    tokens: Path | None = None
    """File of bearer tokens (shared/rpc/auth.py); None = no token needed."""
    reflection: bool = False
    log_level: str = "info"

    max_waiting_requests: int = Field(default=256, ge=1)
    max_prompt_bytes: int = Field(default=1024 * 1024, ge=1)
    max_prompt_tokens: int = Field(default=131_072, ge=1)
    max_generated_tokens: int = Field(default=65_536, ge=1)
    max_queue_s: float = Field(default=600.0, gt=0)
    """Longest wait of a request for its place; also the wait of one that does not say."""
    max_run_s: float = Field(default=3600.0, gt=0)
    """Longest run of a request, wait included; also the run of one that does not say."""

    kv_memory_fraction: float = Field(default=0.25, gt=0, le=0.9)
    """Share of the free memory that an engine's KV pools take when its load request does not say."""
    stall_after_s: float = Field(default=30.0, gt=0)
    """A reader that takes no event for so long while some wait loses its stream."""
    hang_after_s: float = Field(default=120.0, gt=0)
    """Liveness fails when work is pending and no step has ended for so long."""
    drain_s: float = Field(default=30.0, ge=0)
    """After SIGTERM running requests may take so long to finish."""

    @property
    def artifacts(self) -> Path:
        return self.data.expanduser() / "artifacts"

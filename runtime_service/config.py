"""Settings of the runtime service, from QUIRE_RUNTIME_* environment variables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_settings import NoDecode, SettingsConfigDict

from runtime_service.core.load_request import LoadRequest
from shared.config import ServiceSettings, split_paths


class RuntimeSettings(ServiceSettings):
    """Times are in seconds."""

    model_config = SettingsConfigDict(env_prefix="QUIRE_RUNTIME_", frozen=True, populate_by_name=True)

    address: str = "127.0.0.1:50062"
    trusted_keys: Annotated[tuple[Path, ...], NoDecode, BeforeValidator(split_paths)] = ()
    """PEM files of Ed25519 public keys, a list as in PATH: with any, only artifacts signed by one of them are loaded."""

    engines: tuple[LoadRequest, ...] = ()
    """Served from the start on; as JSON: `[{"artifact_id": "...", "name": "chat", "num_pages": 512}]` (core/load_request.py)."""

    max_waiting_requests: int = Field(default=256, ge=1)
    max_prompt_bytes: int = Field(default=1024 * 1024, ge=1)
    max_prompt_tokens: int = Field(default=131_072, ge=1)
    max_generated_tokens: int = Field(default=65_536, ge=1)
    max_queue_s: float = Field(default=600.0, gt=0)
    """Longest wait of a request for its place; also the wait of one that does not say."""
    max_run_s: float = Field(default=3600.0, gt=0)
    """Longest life of a request, the wait included; also the life of one that does not say."""

    kv_memory_fraction: float = Field(default=0.25, gt=0, le=0.9)
    """Share of the host's available memory that an engine's KV pools may take when its load request does not say."""
    device_margin_bytes: int = Field(default=4 << 30, ge=0)
    """Memory of a GPU that stays free when a load request leaves the pools' size to the server: steps and their graphs need it."""
    stall_after_s: float = Field(default=30.0, gt=0)
    """A reader that takes no event for so long while some wait loses its stream."""
    hang_after_s: float = Field(default=120.0, gt=0)
    """Liveness fails when work is pending and no step has ended for so long."""

    @property
    def longest_call_s(self) -> float:
        """A request's, and its last words to a slow reader."""
        return self.max_run_s + self.stall_after_s

    @property
    def roster_file(self) -> Path:
        """The engines to bring back (service/roster.py)."""
        return self.data_directory / "runtime-engines.json"

"""Settings of the compiler service, from QUIRE_COMPILER_* environment variables."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from shared.config import ServiceSettings


class CompilerSettings(ServiceSettings):
    """Every cap has a default; a bad value is a pydantic ValidationError that names it."""

    model_config = SettingsConfigDict(env_prefix="QUIRE_COMPILER_", frozen=True, populate_by_name=True)

    address: str = "127.0.0.1:50061"
    model_roots: Annotated[tuple[Path, ...], NoDecode] = Field(default_factory=lambda: (Path.home(), Path.cwd()), min_length=1)
    """Sources are read from these directories alone; a list as in PATH. Default: the user's home and the working directory."""
    drain_s: float = Field(default=5.0, ge=0)
    """Longest time running calls get after SIGTERM. Builds get none: their jobs go back to the queue."""
    build_slots: int = Field(default=1, ge=1, le=64)
    """Builds that run at the same time. One keeps about two cores busy."""
    max_explains: int = Field(default=1, ge=1, le=64)
    """ExplainModel calls that run at the same time; others wait."""
    explain_timeout_s: float = Field(default=900.0, gt=0)
    reclaim_every_s: float = Field(default=5.0, gt=0)
    """How often lapsed leases and jobs that waited too long are looked for."""

    @field_validator("model_roots", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return tuple(value.split(os.pathsep)) if isinstance(value, str) else value

    @property
    def queue_file(self) -> Path:
        return self.data_directory / "jobs.sqlite"

    @property
    def digest_cache_file(self) -> Path:
        return self.data_directory / "source-digests.json"

    @property
    def build_directory(self) -> Path:
        """Scratch and logs of builds."""
        return self.data_directory / "builds"

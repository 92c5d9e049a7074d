"""Settings of the compiler service, from QUIRE_COMPILER_* environment variables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from shared.config import ServiceSettings, split_paths
from shared.jobs.locate import REDIS_SCHEMES


class CompilerSettings(ServiceSettings):
    """Every cap has a default; a bad value is a pydantic ValidationError that names it."""

    model_config = SettingsConfigDict(env_prefix="QUIRE_COMPILER_", frozen=True, populate_by_name=True)

    address: str = "127.0.0.1:50061"
    redis_url: str = ""
    """`redis://`, `rediss://` or `unix://`: the queue that several compilers share. Empty = a SQLite file in `data`."""
    model_roots: Annotated[tuple[Path, ...], NoDecode, BeforeValidator(split_paths)] = Field(
        default_factory=lambda: (Path.home(), Path.cwd()), min_length=1
    )
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

    @field_validator("redis_url")
    @classmethod
    def _is_redis(cls, value: str) -> str:
        if value and not value.startswith(REDIS_SCHEMES):
            raise ValueError(f"redis_url must start with {', '.join(REDIS_SCHEMES)}; got {value[:20]!r}")
        return value

    @property
    def queue_location(self) -> str:
        return self.redis_url or str(self.data_directory / "jobs.sqlite")

    @property
    def digest_cache_file(self) -> Path:
        return self.data_directory / "source-digests.json"

    @property
    def build_directory(self) -> Path:
        """Scratch and logs of builds."""
        return self.data_directory / "builds"

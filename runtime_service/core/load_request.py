"""What an operator asks a runtime to serve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict

from runtime_service.core.params import CompactionParams
from shared.errors import FieldOutOfRange
from shared.ids import check_artifact_id, check_name


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Serve the engine `artifact_id` under `name`. Its pool has `num_pages` pages (one is the dump page), or `kv_bytes` of them, or
    the server's choice; `compaction` is applied to requests that do not choose; `prefix_caching` lets requests go on from what
    earlier ones have computed, where the engine's caches allow it. FieldOutOfRange names the field that is off."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    artifact_id: str
    name: str
    num_pages: int | None = None
    kv_bytes: int | None = None
    compaction: CompactionParams | None = None
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        check_artifact_id(self.artifact_id)
        check_name(self.name, field="name")
        if self.num_pages is not None and self.kv_bytes is not None:
            raise FieldOutOfRange(f"{self.name} needs num_pages or kv_bytes, not both", field="kv_bytes")
        if self.num_pages is not None and self.num_pages < 2:
            raise FieldOutOfRange(f"num_pages must be at least 2 (one is the dump page); got {self.num_pages}", field="num_pages")

"""Which engines a runtime served last, in one small file: a runtime that crashed, was killed or restarted serves them again.

An attempt is counted before an engine is loaded and forgotten when it has been: an engine whose loading takes the process down is
given up after a few starts instead of keeping the others from being served.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

import structlog
from pydantic import ConfigDict, TypeAdapter, ValidationError

from runtime_service.core.load_request import LoadRequest
from shared.errors import FieldOutOfRange
from shared.manifest import canonical_json
from shared.small_file import replace_file

MAX_ATTEMPTS = 3

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RosterEntry:
    """`attempts`: starts during which the process ended while it loaded this."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    request: LoadRequest
    attempts: int = 0


_ENTRIES = TypeAdapter(tuple[RosterEntry, ...])


class Roster:
    """The entries in `file`, which need not exist. One writer at a time: two runtimes need two data directories."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def read(self) -> tuple[RosterEntry, ...]:
        """Nothing where the file is absent; a damaged one is logged and taken as empty: it must not keep the runtime down."""
        try:
            return _ENTRIES.validate_json(self._file.read_bytes())
        except FileNotFoundError:
            return ()
        except (OSError, ValidationError, FieldOutOfRange) as error:
            _log.error("list of engines not readable; none is brought back", file=str(self._file), error=str(error))
            return ()

    def write(self, entries: Sequence[RosterEntry]) -> None:
        """Replace the file, whole or not at all. A disk that fails is logged: what is loaded goes on being served."""
        try:
            replace_file(self._file, canonical_json([asdict(entry) for entry in entries]))
        except OSError as error:
            _log.error("list of engines not written; after a crash they are not brought back", error=str(error))

"""Exit codes by error class; scripts may rely on them."""

from __future__ import annotations

from shared import errors
from shared.errors import QuireError

OK = 0
INTERNAL = 1
USAGE = 2
INTERRUPTED = 130

# The first class an error is an instance of decides.
EXIT_CODES: dict[type[QuireError], int] = {
    errors.InvalidInput: USAGE,
    errors.NotFound: 3,
    errors.Conflict: 4,
    errors.Refused: 5,
    errors.Exhausted: 6,
    errors.Unavailable: 7,
    errors.TimedOut: 8,
    errors.Cancelled: 9,
    errors.ReaderStalled: 9,
    errors.Denied: 10,
    errors.ArtifactCorrupt: 11,
    errors.InternalError: INTERNAL,
}


def exit_code(error: QuireError) -> int:
    for kind, code in EXIT_CODES.items():
        if isinstance(error, kind):
            return code
    return INTERNAL

"""Every failure Quire reports on purpose.

    QuireError
    ├── InvalidInput            the caller's input; nothing changed
    │   ├── FieldOutOfRange         one field of a request is bad or over its cap
    │   ├── SourceInvalid           a model source is corrupt, incomplete or contradicts itself
    │   ├── UnsafeSource            a source that would run code when read (pickled weights, remote code)
    │   ├── UnsupportedModel        a sound source of a kind this compiler does not lower
    │   └── MessageTooLarge         a message over the transport's cap
    ├── NotFound                names something that is not here
    │   ├── ModelNotFound
    │   ├── JobNotFound
    │   └── ArtifactNotFound
    ├── Conflict                the same name is already taken, or the state forbids the verb
    │   ├── DuplicateRequest
    │   └── JobStateConflict
    ├── Refused                 sound input that must not go further here
    │   ├── WriteNotProven          a cache write without a proof of contiguity
    │   ├── EngineIncompatible      an artifact that does not fit this device or software
    │   ├── BackendUnavailable      this host cannot build or run with that backend
    │   ├── BuildFailed             the build ended without an engine
    │   ├── ArtifactUntrusted       no signature by a configured key
    │   └── InUse                   deleting or unloading what still serves
    ├── Exhausted               no room now
    │   ├── QueueFull
    │   ├── KVExhausted
    │   └── MemoryExhausted
    ├── Unavailable             not now; try again
    │   ├── Draining
    │   ├── Starting
    │   └── StoreUnavailable        the queue or the artifact store does not answer
    ├── TimedOut
    │   ├── QueueTimeout
    │   └── RunTimeout
    ├── Cancelled               somebody asked for the end
    ├── ReaderStalled           the client stopped reading its stream
    ├── Denied
    │   ├── TokenInvalid
    │   └── ScopeMissing
    ├── ArtifactCorrupt         stored bytes differ from what their manifest promises
    └── InternalError           our bug, named

Each leaf has one `reason` (the wire's ErrorInfo.reason) and says whether the same call may succeed later unchanged
(`retryable`). Transport codes live in `shared/rpc/status.py`; a test walks this tree and fails if a class has none.
"""

from __future__ import annotations

from typing import ClassVar


class QuireError(Exception):
    """Base of every error raised on purpose.

    `message` says what was expected, what came and what to do. `details` are short strings for the wire (ErrorInfo.metadata).
    `field` names the offending request field, dotted (`sampling.top_p`). `retry_after_s` is a hint where waiting helps.
    """

    reason: ClassVar[str] = "INTERNAL"
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        retry_after_s: float | None = None,
        details: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s
        self.details = dict(details or {})


class InvalidInput(QuireError):
    reason = "INVALID_INPUT"


class FieldOutOfRange(InvalidInput):
    reason = "FIELD_OUT_OF_RANGE"


class SourceInvalid(InvalidInput):
    reason = "SOURCE_INVALID"


class UnsafeSource(InvalidInput):
    reason = "SOURCE_UNSAFE"


class UnsupportedModel(InvalidInput):
    reason = "MODEL_UNSUPPORTED"


class MessageTooLarge(InvalidInput):
    reason = "MESSAGE_TOO_LARGE"


class NotFound(QuireError):
    reason = "NOT_FOUND"


class ModelNotFound(NotFound):
    reason = "MODEL_NOT_FOUND"


class JobNotFound(NotFound):
    reason = "JOB_NOT_FOUND"


class ArtifactNotFound(NotFound):
    reason = "ARTIFACT_NOT_FOUND"


class Conflict(QuireError):
    reason = "CONFLICT"


class DuplicateRequest(Conflict):
    reason = "DUPLICATE_REQUEST"


class JobStateConflict(Conflict):
    reason = "JOB_STATE_CONFLICT"


class Refused(QuireError):
    reason = "REFUSED"


class WriteNotProven(Refused):
    reason = "WRITE_NOT_PROVEN"


class EngineIncompatible(Refused):
    """`details` carries `field`, `expected` and `got`."""

    reason = "ENGINE_INCOMPATIBLE"


class BackendUnavailable(Refused):
    reason = "BACKEND_UNAVAILABLE"


class BuildFailed(Refused):
    reason = "BUILD_FAILED"


class ArtifactUntrusted(Refused):
    reason = "ARTIFACT_UNTRUSTED"


class InUse(Refused):
    reason = "IN_USE"


class Exhausted(QuireError):
    reason = "EXHAUSTED"
    retryable = True


class QueueFull(Exhausted):
    reason = "QUEUE_FULL"


class KVExhausted(Exhausted):
    reason = "KV_EXHAUSTED"


class MemoryExhausted(Exhausted):
    reason = "MEMORY_EXHAUSTED"


class Unavailable(QuireError):
    reason = "UNAVAILABLE"
    retryable = True


class Draining(Unavailable):
    reason = "DRAINING"


class Starting(Unavailable):
    reason = "STARTING"


class StoreUnavailable(Unavailable):
    reason = "STORE_UNAVAILABLE"


class TimedOut(QuireError):
    reason = "TIMED_OUT"
    retryable = True


class QueueTimeout(TimedOut):
    reason = "QUEUE_TIMEOUT"


class RunTimeout(TimedOut):
    reason = "RUN_TIMEOUT"


class Cancelled(QuireError):
    reason = "CANCELLED"


class ReaderStalled(QuireError):
    reason = "READER_STALLED"
    retryable = True


class Denied(QuireError):
    reason = "DENIED"


class TokenInvalid(Denied):
    reason = "TOKEN_INVALID"


class ScopeMissing(Denied):
    reason = "SCOPE"


class ArtifactCorrupt(QuireError):
    reason = "ARTIFACT_CORRUPT"


class InternalError(QuireError):
    reason = "INTERNAL"

"""A job and its history as values. What may become of a job is in shared/jobs/lifecycle.py."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cache
from typing import ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from shared.errors import FieldOutOfRange, InternalError, QuireError
from shared.ids import JobId
from shared.manifest import canonical_json
from shared.text import clip

_STRICT = ConfigDict(extra="forbid", strict=True)
_CAPS = {"max_runtime_s": 7 * 86400.0, "max_pending_s": 30 * 86400.0, "max_host_bytes": 1 << 50, "max_attempts": 20}


class JobState(StrEnum):
    """The transitions are drawn in shared/jobs/queue.py."""

    QUEUED = "queued"
    RUNNING = "running"
    PUBLISHING = "publishing"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"
    DEAD_LETTERED = "dead_lettered"

    @property
    def is_terminal(self) -> bool:
        """Terminal states never change."""
        return self not in (JobState.QUEUED, JobState.RUNNING, JobState.PUBLISHING)


@dataclass(frozen=True, slots=True)
class JobLimits:
    """Bounds of one job. FieldOutOfRange names the one that is off.

    `max_runtime_s` bounds one attempt, its publication included, `max_pending_s` one wait in the queue (counted anew from when a
    retry becomes due), `max_host_bytes` the resident memory of the build process, `max_attempts` how often the job is handed to a
    worker.
    """

    max_runtime_s: float = 3600.0
    max_pending_s: float = 24 * 3600.0
    max_host_bytes: int = 64 << 30
    max_attempts: int = 3

    def __post_init__(self) -> None:
        for name, cap in _CAPS.items():
            value = getattr(self, name)
            if not (math.isfinite(value) and 0 < value <= cap):
                raise FieldOutOfRange(f"limits.{name} must be over 0 and at most {cap}; got {value}", field=f"limits.{name}")


@dataclass(frozen=True, slots=True)
class JobError:
    """Why an attempt or a job ended badly: the wire facts of a QuireError. `at` is the request's field at fault, if one is."""

    reason: str
    message: str
    retryable: bool = False
    details: dict[str, str] = field(default_factory=dict)
    at: str = ""

    @classmethod
    def of(cls, error: QuireError) -> JobError:
        details = {clip(name): clip(value) for name, value in error.details.items()}
        return cls(
            reason=error.reason, message=clip(error.message), retryable=error.retryable, details=details, at=clip(error.field)
        )


@dataclass(frozen=True, slots=True)
class Job:
    """One job. Times are Unix seconds on the queue's clock.

    `spec` is the queue's to carry, not to read; `spec_digest` is the same for jobs that build the same. `attempt` counts claims
    that were not given back; `fence` grows with every claim, so that a worker that lost its lease can be told from the one that
    has it. `available_s`: not before this may it be claimed. `started_s` is the latest attempt's, `error` the latest failure's.
    `revision` grows with every stored change. `traceparent` is the trace context of the request that made it, or empty.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    job_id: JobId
    request_id: str
    spec: bytes = field(repr=False)
    spec_digest: str
    limits: JobLimits
    state: JobState
    created_s: float
    available_s: float
    stage: str = ""
    attempt: int = 0
    fence: int = 0
    worker: str = ""
    lease_expires_s: float | None = None
    cancel_requested: bool = False
    started_s: float | None = None
    finished_s: float | None = None
    artifact_id: str = ""
    reused: bool = False
    error: JobError | None = None
    traceparent: str = ""
    last_sequence: int = 0
    revision: int = 0

    @property
    def request_digest(self) -> str:
        """What its `request_id` stands for: the spec alone, whatever built it and from which state of its source."""
        return hashlib.sha256(self.spec).hexdigest()


@dataclass(frozen=True, slots=True)
class JobEvent:
    """One line of a job's history. `sequence` counts from 1 without gaps; `fraction` is the stage's progress, 0 to 1."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT
    sequence: int
    time_s: float
    state: JobState
    stage: str
    fraction: float
    message: str
    rss_bytes: int
    attempt: int


@dataclass(frozen=True, slots=True)
class FencingToken:
    """Proof of a claim. Only the job's newest one can change the job."""

    job_id: JobId
    fence: int


@dataclass(frozen=True, slots=True)
class Claim:
    """A job handed to a worker, who must renew the lease by heartbeats less than `lease_s` apart."""

    job: Job
    lease_s: float

    @property
    def token(self) -> FencingToken:
        return FencingToken(self.job.job_id, self.job.fence)


class HeartbeatAnswer(StrEnum):
    """What a heartbeat tells the worker. Anything but CONTINUE means: stop the build now."""

    CONTINUE = "continue"
    CANCEL = "cancel"
    """Somebody cancelled; finish as CANCELLED."""
    OVERDUE = "overdue"
    """The attempt ran past max_runtime_s; finish as TIMED_OUT."""
    LOST = "lost"
    """The claim is somebody else's by now, or the job is over; drop everything."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a worker ends a job for good. ValueError for a combination that says nothing."""

    state: JobState
    artifact_id: str = ""
    reused: bool = False
    error: JobError | None = None

    def __post_init__(self) -> None:
        if self.state not in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.TIMED_OUT):
            raise ValueError(f"a worker ends a job as succeeded, failed, cancelled or timed_out; got {self.state}")
        if (self.state is JobState.SUCCEEDED) != bool(self.artifact_id):
            raise ValueError("a job has an artifact exactly when it succeeded")
        if (self.state in (JobState.FAILED, JobState.TIMED_OUT)) != (self.error is not None):
            raise ValueError("a job has an error exactly when it failed or timed out")


# Stored form: canonical JSON, read back strictly.


def encode(value: Job | JobEvent) -> bytes:
    fields = asdict(value)
    if isinstance(value, Job):
        fields["spec"] = value.spec.decode()
    return canonical_json(fields)


def decode_job(data: bytes) -> Job:
    """InternalError for a record that another version wrote or something damaged."""
    with _reading():
        return _job_adapter().validate_json(data)


def decode_event(data: bytes) -> JobEvent:
    """InternalError as for `decode_job`."""
    with _reading():
        return _event_adapter().validate_json(data)


@cache
def _job_adapter() -> TypeAdapter[Job]:
    return TypeAdapter(Job)


@cache
def _event_adapter() -> TypeAdapter[JobEvent]:
    return TypeAdapter(JobEvent)


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except (ValidationError, FieldOutOfRange) as error:
        raise InternalError(f"a stored job record does not fit this version of Quire: {error}") from error

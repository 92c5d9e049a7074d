"""What an attempt came to, and what that means for its job. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from compiler_service.worker.protocol import Built, Explained, Failed, Keyed
from shared.errors import BuildFailed, InternalError, MemoryExhausted, RunTimeout
from shared.jobs.job import JobError, JobLimits, JobState, Outcome


@dataclass(frozen=True, slots=True)
class Crashed:
    """The process ended without an answer. `evidence` says how, where and with how much memory."""

    evidence: str


@dataclass(frozen=True, slots=True)
class CancelledByCaller:
    pass


@dataclass(frozen=True, slots=True)
class Overdue:
    pass


@dataclass(frozen=True, slots=True)
class OverMemory:
    """`container_bytes`: the limit of the container, where that was about to be reached and not the job's own."""

    rss_bytes: int
    container_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ClaimLost:
    """Somebody else has the job by now, or it is over."""


@dataclass(frozen=True, slots=True)
class WorkerStopping:
    pass


Result = Built | Explained | Keyed | Failed | Crashed | CancelledByCaller | Overdue | OverMemory | ClaimLost | WorkerStopping


@dataclass(frozen=True, slots=True)
class Retry:
    """This attempt failed; the next one may not."""

    error: JobError


@dataclass(frozen=True, slots=True)
class GiveBack:
    """The attempt does not count."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Nothing of it is ours to report."""


def settle(result: Result, limits: JobLimits) -> Outcome | Retry | GiveBack | Drop:
    """What to tell the queue.

    A crash is worth another attempt (it may have been the machine), within the job's limits. A refusal of the input, an overrun
    of time or memory would come out the same again and ends the job.
    """
    match result:
        case Built(artifact_id=artifact_id, reused=reused):
            return Outcome(JobState.SUCCEEDED, artifact_id=artifact_id, reused=reused)
        case Failed(error=error):
            return Retry(error) if error.retryable else Outcome(JobState.FAILED, error=error)
        case Crashed(evidence=evidence):
            return Retry(JobError(BuildFailed.reason, evidence, retryable=True))
        case CancelledByCaller():
            return Outcome(JobState.CANCELLED)
        case Overdue():
            message = f"the build ran longer than {limits.max_runtime_s:g} s (limits.max_runtime_s); raise it or compile less"
            return Outcome(JobState.TIMED_OUT, error=JobError(RunTimeout.reason, message, retryable=False))
        case OverMemory(rss_bytes=rss_bytes, container_bytes=None):
            message = f"the build held {rss_bytes} bytes, more than {limits.max_host_bytes} (limits.max_host_bytes); raise it"
            return Outcome(JobState.FAILED, error=JobError(MemoryExhausted.reason, message, retryable=False))
        case OverMemory(rss_bytes=rss_bytes, container_bytes=container_bytes):
            message = (
                f"the compiler's container has {container_bytes} bytes and ran out of them while the build held {rss_bytes}; give "
                "it more, or its service fewer build slots"
            )
            return Outcome(JobState.FAILED, error=JobError(MemoryExhausted.reason, message, retryable=False))
        case ClaimLost():
            return Drop()
        case WorkerStopping():
            return GiveBack()
        case Explained() | Keyed():
            message = "the build process answered another question than the one it was asked"
            return Outcome(JobState.FAILED, error=JobError(InternalError.reason, message))

"""An attempt that has ended, for whoever counts and traces attempts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shared.jobs.job import Job, JobState
from shared.telemetry.trace import Span

LOST = "lost"
"""What became of an attempt whose result the queue did not take: the job is somebody else's, or the queue was out of reach."""


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """`claimed` is the job as it was when the attempt began, `job` as it is now; None if the queue did not take the result."""

    claimed: Job
    job: Job | None
    worker: str
    begun_s: float
    ended_s: float
    stages: tuple[Span, ...]

    @property
    def outcome(self) -> str:
        """The job's state now; `queued` where it will be tried again."""
        return LOST if self.job is None else str(self.job.state)

    @property
    def span(self) -> Span:
        return Span(
            "compile",
            self.begun_s,
            self.ended_s,
            {
                "quire.job_id": self.claimed.job_id,
                "quire.attempt": self.claimed.attempt,
                "quire.worker": self.worker,
                "quire.outcome": self.outcome,
            },
            error=self._error,
            parts=self.stages,
        )

    @property
    def _error(self) -> str:
        """The reason this attempt failed for; a job's own error may be an earlier attempt's."""
        job = self.job
        if job is None:
            return LOST
        if job.error is None or job.state in (JobState.SUCCEEDED, JobState.CANCELLED) or job.attempt != self.claimed.attempt:
            return ""
        return job.error.reason


AttemptObserver = Callable[[AttemptRecord], None]

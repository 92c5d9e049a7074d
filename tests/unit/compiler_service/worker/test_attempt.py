"""Every way an attempt can come out means one thing for its job."""

import pytest

from compiler_service.worker.attempt import (
    CancelledByCaller,
    ClaimLost,
    Crashed,
    Drop,
    GiveBack,
    Overdue,
    OverMemory,
    Retry,
    WorkerStopping,
    settle,
)
from compiler_service.worker.protocol import Built, Explained, Failed
from shared.jobs.job import JobError, JobLimits, JobState

LIMITS = JobLimits(max_runtime_s=90, max_host_bytes=1000)
FINAL, PASSING = JobError("SOURCE_INVALID", "no"), JobError("STORE_UNAVAILABLE", "later", retryable=True)


@pytest.mark.parametrize(
    ("result", "state", "reason"),
    [
        (Failed(FINAL), JobState.FAILED, "SOURCE_INVALID"),
        (CancelledByCaller(), JobState.CANCELLED, None),
        (Overdue(), JobState.TIMED_OUT, "RUN_TIMEOUT"),
        (OverMemory(1001), JobState.FAILED, "MEMORY_EXHAUSTED"),
        (Explained(()), JobState.FAILED, "INTERNAL"),
    ],
)
def test_what_ends_a_job(result, state, reason):
    outcome = settle(result, LIMITS)
    assert (outcome.state, outcome.error and outcome.error.reason) == (state, reason)


def test_a_build_carries_its_artifact():
    outcome = settle(Built("a" * 64, reused=True), LIMITS)
    assert (outcome.state, outcome.artifact_id, outcome.reused) == (JobState.SUCCEEDED, "a" * 64, True)


def test_what_is_tried_again():
    assert settle(Failed(PASSING), LIMITS) == Retry(PASSING)
    crash = settle(Crashed("ended by SIGKILL"), LIMITS)
    assert (crash.error.reason, crash.error.message, crash.error.retryable) == ("BUILD_FAILED", "ended by SIGKILL", True)


def test_what_is_not_this_workers_to_say():
    assert settle(ClaimLost(), LIMITS) == Drop()
    assert settle(WorkerStopping(), LIMITS) == GiveBack()


def test_limits_are_named_with_both_numbers():
    assert "90 s (limits.max_runtime_s)" in settle(Overdue(), LIMITS).error.message
    assert "held 1001 bytes, more than 1000 (limits.max_host_bytes)" in settle(OverMemory(1001), LIMITS).error.message

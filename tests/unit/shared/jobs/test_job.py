"""Job values: limits, outcomes, and the stored form, read back strictly."""

from __future__ import annotations

import json
import math

import pytest

from shared.errors import ArtifactCorrupt, FieldOutOfRange, InternalError
from shared.ids import JobId
from shared.jobs.job import Job, JobError, JobEvent, JobLimits, JobState, Outcome, clip, decode_event, decode_job, encode
from shared.jobs.queue import QueuePolicy

JOB = Job(
    job_id=JobId("j"),
    request_id="r",
    spec='{"s":"é"}'.encode(),
    spec_digest="d",
    limits=JobLimits(),
    state=JobState.DEAD_LETTERED,
    created_s=1.5,
    available_s=2,
    lease_expires_s=3.25,
    error=JobError(reason="BUILD_FAILED", message="m", retryable=True, details={"a": "b"}),
)
EVENT = JobEvent(sequence=1, time_s=2.0, state=JobState.RUNNING, stage="load", fraction=0.5, message="é", rss_bytes=3, attempt=1)


def test_records_come_back_as_they_were() -> None:
    assert decode_job(encode(JOB)) == JOB
    assert decode_event(encode(EVENT)) == EVENT


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("state", "sleeping"),
        ("attempt", "1"),
        ("created_s", None),
        ("limits", {"max_attempts": "3"}),
        ("error", {"reason": "x"}),
        ("fence", 1.5),
    ],
)
def test_a_record_with_a_field_of_another_kind_is_refused(field: str, value: object) -> None:
    fields = json.loads(encode(JOB))
    fields[field] = value
    with pytest.raises(InternalError):
        decode_job(json.dumps(fields).encode())


def test_a_record_with_more_or_less_fields_is_refused() -> None:
    fields = json.loads(encode(JOB))
    with pytest.raises(InternalError):
        decode_job(json.dumps(fields | {"priority": 1}).encode())
    del fields["spec"]
    with pytest.raises(InternalError):
        decode_job(json.dumps(fields).encode())
    with pytest.raises(InternalError):
        decode_event(b"\x80")


def test_a_record_with_limits_out_of_range_is_refused() -> None:
    fields = json.loads(encode(JOB))
    fields["limits"]["max_attempts"] = 0
    with pytest.raises(InternalError):
        decode_job(json.dumps(fields).encode())


@pytest.mark.parametrize("field", ["max_runtime_s", "max_pending_s", "max_host_bytes", "max_attempts"])
@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan, 1e30])
def test_absurd_limits_name_their_field(field: str, value: float) -> None:
    with pytest.raises(FieldOutOfRange) as caught:
        JobLimits(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == f"limits.{field}"


def test_outcomes_that_say_nothing_are_refused() -> None:
    error = JobError(reason="BUILD_FAILED", message="m")
    for state in (JobState.QUEUED, JobState.RUNNING, JobState.PUBLISHING, JobState.DEAD_LETTERED):
        with pytest.raises(ValueError, match="a worker ends a job"):
            Outcome(state)
    with pytest.raises(ValueError, match="artifact"):
        Outcome(JobState.SUCCEEDED)
    with pytest.raises(ValueError, match="artifact"):
        Outcome(JobState.FAILED, artifact_id="a", error=error)
    with pytest.raises(ValueError, match="error"):
        Outcome(JobState.FAILED)
    with pytest.raises(ValueError, match="error"):
        Outcome(JobState.CANCELLED, error=error)


def test_an_error_keeps_the_facts_the_wire_needs() -> None:
    error = ArtifactCorrupt("bad \udcff", details={"file": "w\udcff"})
    assert JobError.of(error) == JobError(reason="ARTIFACT_CORRUPT", message="bad ?", details={"file": "w?"})


def test_clipped_text_is_at_most_as_long_as_promised() -> None:
    assert clip("x" * 2000) == "x" * 2000
    assert clip("x" * 2001) == "x" * 1999 + "…"


def test_retries_wait_exponentially_longer_up_to_a_cap() -> None:
    policy = QueuePolicy(retry_delay_s=5, max_retry_delay_s=30)
    assert [policy.retry_delay(attempt) for attempt in (1, 2, 3, 4, 20)] == [5, 10, 20, 30, 30]

"""Any sequence of verbs, by workers that are live, late or lying, keeps the promises of the queue."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shared.errors import Cancelled, JobStateConflict
from shared.ids import JobId
from shared.jobs import lifecycle
from shared.jobs.job import FencingToken, HeartbeatAnswer, Job, JobError, JobEvent, JobLimits, JobState, Outcome, decode_job, encode
from shared.jobs.lifecycle import Change
from shared.jobs.queue import QueuePolicy

POLICY = QueuePolicy(lease_s=10, retry_delay_s=4, max_retry_delay_s=16)
ERROR = JobError(reason="BUILD_FAILED", message="m")
OUTCOMES = [
    Outcome(JobState.SUCCEEDED, artifact_id="a"),
    Outcome(JobState.FAILED, error=ERROR),
    Outcome(JobState.CANCELLED),
    Outcome(JobState.TIMED_OUT, error=ERROR),
]


class Life(RuleBasedStateMachine):
    """One job; `tokens` are all ever handed out, the last is the newest."""

    @initialize(attempts=st.integers(1, 4))
    def accept(self, attempts: int) -> None:
        limits = JobLimits(max_attempts=attempts, max_runtime_s=100, max_pending_s=50)
        job = Job(JobId("j"), "r", b"{}", "d", limits, JobState.QUEUED, created_s=0.0, available_s=0.0)
        self.now, self.tokens, self.events, self.failures = 0.0, [FencingToken(job.job_id, 0)], [], 0
        self.published = False
        self.take(lifecycle.submitted(job))

    def take(self, change: Change) -> None:
        before = getattr(self, "job", None)
        if before is not None and before.state.is_terminal:
            assert change.job is before, "a terminal job changed"
        self.job: Job = change.job
        self.events: list[JobEvent] = [*self.events, *change.events]

    @rule(seconds=st.sampled_from([0.5, 3.0, 11.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def claim(self) -> None:
        if self.job.state is JobState.QUEUED and self.job.available_s <= self.now < lifecycle.due_s(self.job, POLICY):
            self.take(lifecycle.claimed(self.job, "w", self.now, POLICY))
            self.tokens.append(FencingToken(self.job.job_id, self.job.fence))
            self.published = False

    @rule(age=st.integers(0, 3), verb=st.sampled_from(["heartbeat", "progress", "publish", "fail", "release", *OUTCOMES]))
    def act(self, age: int, verb: str | Outcome) -> None:
        """The worker with the newest claim (age 0) or one with an older one."""
        token = self.tokens[max(len(self.tokens) - 1 - age, 0)]
        before = self.job
        holds = token.fence == before.fence and before.state in (JobState.RUNNING, JobState.PUBLISHING)
        try:
            self.take(self.decide(token, verb))
        except (JobStateConflict, Cancelled):
            assert self.job is before
            assert not holds or (verb == "publish" and before.cancel_requested)
            return
        assert holds or self.job is before, "somebody without the newest claim changed the job"

    def decide(self, token: FencingToken, verb: str | Outcome) -> Change:
        match verb:
            case "heartbeat":
                change, answer = lifecycle.heartbeat(self.job, token, self.now, POLICY)
                if answer is not HeartbeatAnswer.LOST:
                    assert change.job.lease_expires_s == self.now + POLICY.lease_s
                return change
            case "progress":
                return lifecycle.progressed(self.job, token, self.now, stage="s", fraction=0.5, message="", rss_bytes=0)
            case "publish":
                change = lifecycle.publishing(self.job, token, self.now, POLICY)
                self.published = True
                return change
            case "fail":
                return lifecycle.failed_attempt(self.job, token, ERROR, self.now, POLICY)
            case "release":
                return lifecycle.released(self.job, token, self.now)
            case Outcome():
                cancel_came_first = self.job.cancel_requested and not self.published
                change = lifecycle.finished(self.job, token, verb, self.now)
                assert not (cancel_came_first and change.job.state is JobState.SUCCEEDED and change.job is not self.job)
                return change
        raise AssertionError(verb)

    @rule()
    def cancel(self) -> None:
        self.take(lifecycle.cancelled(self.job, self.now))
        assert self.job.cancel_requested or self.job.state.is_terminal

    @rule()
    def keep_house(self) -> None:
        if not self.job.state.is_terminal and lifecycle.due_s(self.job, POLICY) <= self.now:
            before = self.job
            self.take(lifecycle.overdue(self.job, self.now, POLICY))
            assert self.job.state.is_terminal or (before.state is not JobState.QUEUED and self.job.state is JobState.QUEUED)

    @invariant()
    def promises(self) -> None:
        if not hasattr(self, "job"):
            return
        job = self.job
        assert [event.sequence for event in self.events] == list(range(1, job.last_sequence + 1))
        assert self.events[-1].state is job.state
        assert [event.state.is_terminal for event in self.events].count(True) == int(job.state.is_terminal)
        assert 0 <= job.attempt <= job.limits.max_attempts
        assert job.fence == self.tokens[-1].fence == len(self.tokens) - 1
        assert (job.lease_expires_s is not None) == (job.state in (JobState.RUNNING, JobState.PUBLISHING))
        assert (job.finished_s is not None) == job.state.is_terminal
        assert (job.artifact_id != "") == (job.state is JobState.SUCCEEDED)
        assert lifecycle.is_joinable(job) == (
            job.state is JobState.SUCCEEDED or not (job.state.is_terminal or job.cancel_requested)
        )
        assert decode_job(encode(job)) == job

    def teardown(self) -> None:
        """However it went, a job that everybody abandons ends: at most its attempts, each a lease and a delay."""
        if not hasattr(self, "job"):
            return
        for _ in range(2):
            if not self.job.state.is_terminal:
                self.now = lifecycle.due_s(self.job, POLICY)
                self.keep_house()
        assert self.job.state.is_terminal


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)

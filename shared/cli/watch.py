"""Following one job to its end, live or silently."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from shared.cli.options import word_of
from shared.cli.session import Session
from shared.errors import Cancelled, TimedOut
from shared.pb.quire.v1 import compiler_pb2, compiler_pb2_grpc
from shared.rpc.status import from_message

S = compiler_pb2.JobState
TERMINAL = frozenset(
    (
        S.JOB_STATE_SUCCEEDED,
        S.JOB_STATE_FAILED,
        S.JOB_STATE_CANCELLED,
        S.JOB_STATE_TIMED_OUT,
        S.JOB_STATE_DEAD_LETTERED,
    )
)


def state_word(state: int) -> str:
    return word_of(compiler_pb2.JobState, "JOB_STATE", state)


def stage_word(stage: int) -> str:
    return word_of(compiler_pb2.BuildStage, "BUILD_STAGE", stage)


@dataclass(slots=True)
class StageBars:
    """One bar a stage on a terminal, one line a change elsewhere, one JSON object an event with --output json."""

    session: Session
    progress: Progress = field(init=False)
    tasks: dict[int, TaskID] = field(default_factory=dict)
    last_line: str = ""

    def __post_init__(self) -> None:
        columns = (TextColumn("{task.description:<8}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[message]}"))
        self.progress = Progress(*columns, console=self.session.progress, disable=not self.session.shows_progress)

    def show(self, event: compiler_pb2.JobEvent) -> None:
        if self.session.as_json:
            self.session.print_json(event)
        elif self.session.shows_progress:
            self._bar(event)
        else:
            line = f"{state_word(event.state)} {stage_word(event.stage) if event.stage else ''} {event.message}".strip()
            if line != self.last_line:
                self.session.progress.print(line, highlight=False)
                self.last_line = line

    def _bar(self, event: compiler_pb2.JobEvent) -> None:
        for stage, task in self.tasks.items():
            if stage != event.stage and not self.progress.tasks[task].finished:
                self.progress.update(task, completed=1.0)
        if not event.stage:
            return
        if event.stage not in self.tasks:
            self.tasks[event.stage] = self.progress.add_task(stage_word(event.stage), total=1.0, message="")
        self.progress.update(self.tasks[event.stage], completed=event.fraction, message=event.message)


def follow(
    session: Session, stub: compiler_pb2_grpc.CompilerStub, job_id: str, *, show: bool, after_sequence: int = 0
) -> compiler_pb2.CompileJob:
    """Wait for the job's end and return it; a job that did not succeed raises the error it ended with."""
    bars = StageBars(session)
    call = stub.WatchCompileJob(compiler_pb2.WatchCompileJobRequest(job_id=job_id, after_sequence=after_sequence))
    try:
        with bars.progress:
            for response in call:
                if show:
                    bars.show(response.event)
    finally:
        call.cancel()
    job: compiler_pb2.CompileJob = stub.GetCompileJob(compiler_pb2.GetCompileJobRequest(job_id=job_id)).job
    if job.state == S.JOB_STATE_SUCCEEDED:
        return job
    if job.error.reason:
        raise from_message(job.error)
    kind = TimedOut if job.state == S.JOB_STATE_TIMED_OUT else Cancelled
    raise kind(f"job {job_id} ended {state_word(job.state)}")

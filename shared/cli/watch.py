"""Following one job to its end, live or silently."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import grpc
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from shared.cli.options import word_of
from shared.cli.session import Session
from shared.errors import Cancelled, TimedOut, Unavailable
from shared.pb.quire.v1 import compiler_pb2, compiler_pb2_grpc
from shared.rpc.status import from_message, from_rpc_error

MAX_OUTAGE_S = 60.0
"""A job outlives its service; one that is not back by then is reported."""
RESUME_EVERY_S = 0.5


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
        columns = (
            TextColumn("{task.description:<8}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[message]}", markup=False),
        )
        self.progress = Progress(*columns, console=self.session.progress, disable=not self.session.shows_progress)

    def show(self, event: compiler_pb2.JobEvent) -> None:
        if self.session.as_json:
            self.session.print_json(event)
        elif self.session.shows_progress:
            self._bar(event)
        else:
            words = (state_word(event.state), stage_word(event.stage) if event.stage else "", event.message)
            line = " ".join(dict.fromkeys(filter(None, words)))
            if line != self.last_line:
                self.session.note(line)
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


def events_of(stub: compiler_pb2_grpc.CompilerStub, job_id: str, after_sequence: int) -> Iterator[compiler_pb2.JobEvent]:
    """Every event after `after_sequence`. Goes on where it broke off, unless the service or its queue stays away for long."""
    seen, away_since = False, None
    while True:
        asked_s = time.monotonic()
        call = stub.WatchCompileJob(compiler_pb2.WatchCompileJobRequest(job_id=job_id, after_sequence=after_sequence))
        try:
            for response in call:
                seen, away_since = True, None
                after_sequence = response.event.sequence
                yield response.event
            return
        except grpc.RpcError as error:
            now_s = time.monotonic()
            if now_s - asked_s > MAX_OUTAGE_S:  # nothing happened for long, and then the connection was too old
                seen, away_since = True, None
            away_since = away_since or now_s
            stays_away = not seen or now_s - away_since > MAX_OUTAGE_S
            if stays_away or not isinstance(from_rpc_error(error), Unavailable):
                raise
        finally:
            call.cancel()
        time.sleep(RESUME_EVERY_S)


def follow(
    session: Session, stub: compiler_pb2_grpc.CompilerStub, job_id: str, *, show: bool, after_sequence: int = 0
) -> compiler_pb2.CompileJob:
    """Wait for the job's end and return it; a job that did not succeed raises the error it ended with."""
    bars = StageBars(session)
    with bars.progress:
        for event in events_of(stub, job_id, after_sequence):
            if show:
                bars.show(event)
    job: compiler_pb2.CompileJob = stub.GetCompileJob(compiler_pb2.GetCompileJobRequest(job_id=job_id)).job
    if job.state == compiler_pb2.JOB_STATE_SUCCEEDED:
        return job
    if job.error.reason:
        raise from_message(job.error)
    kind = TimedOut if job.state == compiler_pb2.JOB_STATE_TIMED_OUT else Cancelled
    raise kind(f"job {job_id} ended {state_word(job.state)}")

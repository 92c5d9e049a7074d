"""`quire jobs`: ls, show, watch, cancel, retry."""

from __future__ import annotations

from typing import Annotated

import typer
from google.protobuf.timestamp_pb2 import Timestamp

from shared.cli import watch
from shared.cli.options import UINT64_MAX, profile_words, word_of
from shared.cli.session import session_of
from shared.ids import new_id
from shared.pb.quire.v1 import common_pb2, compiler_pb2

app = typer.Typer(help="Compile jobs.", no_args_is_help=True)
JobId = Annotated[str, typer.Argument(help="job id")]
COLUMNS = ("job", "state", "stage", "attempt", "created", "source", "artifact")


def _row(job: compiler_pb2.CompileJob) -> tuple[object, ...]:
    stage = watch.stage_word(job.stage) if job.stage else ""
    return (
        job.job_id,
        watch.state_word(job.state),
        stage,
        job.attempt,
        _moment(job.created_at),
        job.spec.source,
        job.artifact_id,
    )


def _moment(time: Timestamp) -> str:
    return time.ToDatetime().isoformat(" ", "seconds") + " UTC"


def _fields(job: compiler_pb2.CompileJob) -> list[tuple[str, object]]:
    """What there is to say of a job; no line for what it has not."""
    spec, limits = job.spec, job.limits
    layout = word_of(common_pb2.KVLayout, "KV_LAYOUT", spec.layout)
    lines: list[tuple[str, object]] = [
        ("job", job.job_id),
        ("state", watch.state_word(job.state)),
        ("stage", watch.stage_word(job.stage) if job.stage else ""),
        ("attempt", f"{job.attempt} of {limits.max_attempts}"),
        ("error", f"{job.error.reason}: {job.error.message}" if job.error.reason else ""),
        ("artifact", job.artifact_id + (" (was in the store)" if job.reused else "")),
        ("source", spec.source),
        ("backend", word_of(common_pb2.Backend, "BACKEND", spec.backend)),
        ("targets", " ".join(spec.targets)),
        ("layout", layout + (f", pages of {spec.page_size}" if spec.page_size else "")),
        ("dtype", word_of(common_pb2.ElementType, "ELEMENT_TYPE", spec.dtype)),
        ("max_len", spec.max_len),
        ("profiles", profile_words(spec.profiles)),
    ]
    lines += [
        (name.removesuffix("_at"), _moment(getattr(job, name)))
        for name in ("created_at", "started_at", "finished_at")
        if job.HasField(name)
    ]
    return [(name, value) for name, value in lines if value]


@app.command("ls")
def list_jobs(context: typer.Context, limit: Annotated[int, typer.Option(min=1, max=500)] = 50) -> None:
    """List the newest jobs."""
    session = session_of(context)
    with session.compiler() as stub:
        response = stub.ListCompileJobs(compiler_pb2.ListCompileJobsRequest(page_size=limit))
    if session.as_json:
        session.print_json(response)
    else:
        session.print_table(COLUMNS, [_row(job) for job in response.jobs])


@app.command()
def show(context: typer.Context, job_id: JobId) -> None:
    """Show one job."""
    session = session_of(context)
    with session.compiler() as stub:
        job = stub.GetCompileJob(compiler_pb2.GetCompileJobRequest(job_id=job_id)).job
    if session.as_json:
        session.print_json(job)
    else:
        session.print_table(("field", "value"), _fields(job))


@app.command("watch")
def watch_job(
    context: typer.Context, job_id: JobId, after: Annotated[int, typer.Option(min=0, max=UINT64_MAX, help="last sequence seen")] = 0
) -> None:
    """Follow a job to its end; ends with the job's error if it has one."""
    session = session_of(context)
    with session.compiler() as stub:
        job = watch.follow(session, stub, job_id, show=True, after_sequence=after)
    if not session.as_json:
        session.print(job.artifact_id)


@app.command()
def cancel(context: typer.Context, job_id: JobId) -> None:
    """Cancel a job; a running build is ended."""
    session = session_of(context)
    with session.compiler() as stub:
        job = stub.CancelCompileJob(compiler_pb2.CancelCompileJobRequest(job_id=job_id)).job
    if session.as_json:
        session.print_json(job)
    else:
        ending = ", its build is being ended" if job.state == compiler_pb2.JOB_STATE_RUNNING else ""
        session.print(watch.state_word(job.state) + ending)


@app.command()
def retry(context: typer.Context, job_id: JobId) -> None:
    """Queue the spec of an unsuccessful job again; prints the new job's id."""
    session = session_of(context)
    with session.compiler() as stub:
        job = stub.RetryCompileJob(compiler_pb2.RetryCompileJobRequest(job_id=job_id, request_id=new_id())).job
    if session.as_json:
        session.print_json(job)
    else:
        session.print(job.job_id)

"""`quire jobs`: ls, show, watch, cancel, retry."""

from __future__ import annotations

from typing import Annotated

import typer

from shared.cli import watch
from shared.cli.options import UINT64_MAX
from shared.cli.session import session_of
from shared.ids import new_id
from shared.pb.quire.v1 import compiler_pb2

app = typer.Typer(help="Compile jobs.", no_args_is_help=True)
JobId = Annotated[str, typer.Argument(help="job id")]
COLUMNS = ("job", "state", "stage", "attempt", "source", "artifact", "created")


def _row(job: compiler_pb2.CompileJob) -> tuple[object, ...]:
    stage = watch.stage_word(job.stage) if job.stage else ""
    created = job.created_at.ToJsonString() if job.HasField("created_at") else ""
    return (job.job_id, watch.state_word(job.state), stage, job.attempt, job.spec.source, job.artifact_id[:12], created)


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
        session.print_fields(job)


@app.command("watch")
def watch_job(
    context: typer.Context, job_id: JobId, after: Annotated[int, typer.Option(min=0, max=UINT64_MAX, help="last sequence seen")] = 0
) -> None:
    """Follow a job to its end; ends with the job's error if it has one."""
    session = session_of(context)
    with session.compiler() as stub:
        job = watch.follow(session, stub, job_id, show=True, after_sequence=after)
    if not session.as_json:
        session.console.print(job.artifact_id, highlight=False)


@app.command()
def cancel(context: typer.Context, job_id: JobId) -> None:
    """Cancel a job; a running build is ended."""
    session = session_of(context)
    with session.compiler() as stub:
        job = stub.CancelCompileJob(compiler_pb2.CancelCompileJobRequest(job_id=job_id)).job
    if session.as_json:
        session.print_json(job)
    else:
        session.console.print(watch.state_word(job.state))


@app.command()
def retry(context: typer.Context, job_id: JobId) -> None:
    """Queue the spec of an unsuccessful job again; prints the new job's id."""
    session = session_of(context)
    with session.compiler() as stub:
        job = stub.RetryCompileJob(compiler_pb2.RetryCompileJobRequest(job_id=job_id, request_id=new_id())).job
    if session.as_json:
        session.print_json(job)
    else:
        session.console.print(job.job_id, highlight=False)

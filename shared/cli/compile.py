"""`quire compile` and `quire explain`."""

from __future__ import annotations

from typing import Annotated

import typer

from shared.cli import watch
from shared.cli.session import session_of
from shared.cli.spec import takes_spec
from shared.errors import WriteNotProven
from shared.ids import new_id
from shared.pb.quire.v1 import common_pb2, compiler_pb2

PROOF_COLUMNS = ("cache", "node", "form", "run", "verdict", "reason")


@takes_spec
def compile_command(
    context: typer.Context,
    spec: compiler_pb2.CompileSpec,
    watch_stages: Annotated[bool, typer.Option("--watch", help="show the stages as they happen")] = False,
) -> None:
    """Compile a model and print the artifact id."""
    session = session_of(context)
    with session.compiler() as stub:
        request = compiler_pb2.CreateCompileJobRequest(request_id=new_id(), spec=spec)
        job = stub.CreateCompileJob(request).job
        job = watch.follow(session, stub, job.job_id, show=watch_stages)
    if session.as_json:
        session.print_json(job)
    else:
        session.print(job.artifact_id)


@takes_spec
def explain_command(context: typer.Context, spec: compiler_pb2.CompileSpec) -> None:
    """Print the proof of every cache write without building anything."""
    session = session_of(context)
    with session.compiler() as stub:
        response = stub.ExplainModel(compiler_pb2.ExplainModelRequest(spec=spec))
    if session.as_json:
        session.print_json(response)
    else:
        session.print_table(PROOF_COLUMNS, [proof_row(cache) for cache in response.caches])
    refused = [c.cache for c in response.caches if c.verdict_before != "proved" or c.verdict_after != "proved"]
    if not session.as_json:
        session.note(f"{len(response.caches) - len(refused)} of {len(response.caches)} cache writes proven")
    if not response.proved:
        raise WriteNotProven(f"not proven: {', '.join(refused) or 'no cache write was found'}")


def proof_row(cache: common_pb2.CacheProof) -> tuple[str, ...]:
    """One cache write in the columns of PROOF_COLUMNS; both verdicts where lowering changed it."""
    run = f"[{cache.start}, +{cache.length}) axis {cache.axis}"
    agree = cache.verdict_before == cache.verdict_after
    verdict = cache.verdict_before if agree else f"{cache.verdict_before} / {cache.verdict_after}"
    return (cache.cache, cache.node, cache.form, run, verdict, cache.reason)

"""`quire compile` and `quire explain`."""

from __future__ import annotations

from typing import Annotated

import typer

from shared.cli import watch
from shared.cli.options import UINT32_MAX, compile_spec, target_words
from shared.cli.session import session_of
from shared.errors import WriteNotProven
from shared.ids import new_id
from shared.pb.quire.v1 import common_pb2, compiler_pb2

Source = Annotated[str, typer.Argument(help="Hugging Face directory, .gguf file or exported .pt2 program")]
Backend = Annotated[str, typer.Option(help="inductor, tensorrt_rtx or tensorrt")]
Layout = Annotated[str, typer.Option(help="paged or linear")]
DType = Annotated[str, typer.Option(help="float32, bfloat16 or float16")]
MaxLen = Annotated[int, typer.Option(min=1, max=UINT32_MAX, help="most KV entries one sequence holds at once")]
PageSize = Annotated[int, typer.Option(min=1, max=UINT32_MAX, help="tokens a page (paged layout)")]
Profiles = Annotated[list[str] | None, typer.Option("--profile", help="NAME=BATCHxLENGTH, repeatable, in order")]
Targets = Annotated[str, typer.Option("--target", help="CUDA targets such as sm80,sm89; empty = this host")]

PROOF_COLUMNS = ("cache", "node", "form", "run", "verdict", "reason")


def compile_command(
    context: typer.Context,
    source: Source,
    backend: Backend = "inductor",
    layout: Layout = "paged",
    dtype: DType = "float32",
    max_len: MaxLen = 2048,
    page_size: PageSize = 16,
    profile: Profiles = None,
    target: Targets = "",
    allow_copying: Annotated[bool, typer.Option(help="copy caches whose writes are not proven, instead of refusing")] = False,
    watch_stages: Annotated[bool, typer.Option("--watch", help="show the stages as they happen")] = False,
) -> None:
    """Compile a model and print the artifact id."""
    session = session_of(context)
    targets = target_words(target)
    spec = compile_spec(source, backend, layout, dtype, max_len, page_size, profile or (), targets, allow_copying=allow_copying)
    with session.compiler() as stub:
        request = compiler_pb2.CreateCompileJobRequest(request_id=new_id(), spec=spec)
        job = stub.CreateCompileJob(request).job
        job = watch.follow(session, stub, job.job_id, show=watch_stages)
    if session.as_json:
        session.print_json(job)
    else:
        session.print(job.artifact_id)


def explain_command(
    context: typer.Context,
    source: Source,
    backend: Backend = "inductor",
    layout: Layout = "paged",
    dtype: DType = "float32",
    max_len: MaxLen = 2048,
    page_size: PageSize = 16,
    profile: Profiles = None,
) -> None:
    """Print the proof of every cache write without building anything."""
    session = session_of(context)
    spec = compile_spec(source, backend, layout, dtype, max_len, page_size, profile or ())
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
    run = f"[{cache.start}, +{cache.length}) axis {cache.axis}"
    agree = cache.verdict_before == cache.verdict_after
    verdict = cache.verdict_before if agree else f"{cache.verdict_before} / {cache.verdict_after}"
    return (cache.cache, cache.node, cache.form, run, verdict, cache.reason)

"""`quire artifacts`: ls, show, verify, rm."""

from __future__ import annotations

from typing import Annotated

import typer

from shared.cli.compile import PROOF_COLUMNS, proof_row
from shared.cli.options import word_of
from shared.cli.session import session_of
from shared.pb.quire.v1 import common_pb2, compiler_pb2

app = typer.Typer(help="Compiled engines and model components.", no_args_is_help=True)
ArtifactId = Annotated[str, typer.Argument(help="artifact id (64 hex digits)")]
COLUMNS = ("artifact", "kind", "model", "backend", "layout", "dtype", "max_len", "profiles", "bytes")


def _row(artifact: compiler_pb2.Artifact) -> tuple[object, ...]:
    if artifact.kind != "engine":
        return (artifact.artifact_id, artifact.kind, artifact.model_name, "", "", "", "", "", artifact.size_bytes)
    profiles = " ".join(f"{p.name}={p.batch.max}x{p.query_len.max}" for p in artifact.profiles)
    backend = word_of(common_pb2.Backend, "BACKEND", artifact.backend)
    layout = word_of(common_pb2.KVLayout, "KV_LAYOUT", artifact.layout)
    dtype = word_of(common_pb2.ElementType, "ELEMENT_TYPE", artifact.dtype)
    return (
        artifact.artifact_id,
        artifact.kind,
        artifact.model_name,
        backend,
        layout,
        dtype,
        artifact.max_len,
        profiles,
        artifact.size_bytes,
    )


@app.command("ls")
def list_artifacts(
    context: typer.Context,
    kind: Annotated[str, typer.Option(help="engine or model")] = "",
    limit: Annotated[int, typer.Option(min=1, max=1000)] = 100,
) -> None:
    """List artifacts."""
    session = session_of(context)
    with session.compiler() as stub:
        response = stub.ListArtifacts(compiler_pb2.ListArtifactsRequest(page_size=limit, kind=kind))
    if session.as_json:
        session.print_json(response)
    else:
        session.print_table(COLUMNS, [_row(artifact) for artifact in response.artifacts])


@app.command()
def show(context: typer.Context, artifact_id: ArtifactId) -> None:
    """Show an artifact: facts, files and, for an engine, its proof."""
    session = session_of(context)
    with session.compiler() as stub:
        artifact = stub.GetArtifact(compiler_pb2.GetArtifactRequest(artifact_id=artifact_id)).artifact
    if session.as_json:
        session.print_json(artifact)
        return
    session.print_table(COLUMNS, [_row(artifact)])
    session.print_table(("file", "sha256", "bytes"), [(f.path, f.sha256, f.size_bytes) for f in artifact.files])
    if artifact.proof:
        session.print_table(PROOF_COLUMNS, [proof_row(cache) for cache in artifact.proof])


@app.command()
def verify(context: typer.Context, artifact_id: ArtifactId) -> None:
    """Read every byte of an artifact and compare it with its manifest."""
    session = session_of(context)
    with session.compiler() as stub:
        response = stub.VerifyArtifact(compiler_pb2.VerifyArtifactRequest(artifact_id=artifact_id))
    if session.as_json:
        session.print_json(response)
    else:
        session.console.print(
            f"{response.files_checked} files, {response.bytes_checked} bytes: as the manifest says", highlight=False
        )


@app.command()
def rm(context: typer.Context, artifact_id: ArtifactId) -> None:
    """Delete an artifact nobody uses."""
    session = session_of(context)
    with session.compiler() as stub:
        response = stub.DeleteArtifact(compiler_pb2.DeleteArtifactRequest(artifact_id=artifact_id))
    if session.as_json:
        session.print_json(response)

"""`quire artifacts`: ls, show, verify, check, rm, explain-miss, gc, sign."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shared.cli.compile import PROOF_COLUMNS, proof_row
from shared.cli.options import byte_count, profile_words, seconds, word_of
from shared.cli.session import session_of
from shared.cli.spec import takes_spec
from shared.errors import BackendUnavailable, EngineIncompatible
from shared.pb.quire.v1 import common_pb2, compiler_pb2, control_pb2

app = typer.Typer(help="Compiled engines and model components.", no_args_is_help=True)
ArtifactId = Annotated[str, typer.Argument(help="artifact id (64 hex digits)")]
COLUMNS = ("kind", "model", "backend", "layout", "dtype", "max_len", "profiles", "bytes", "artifact")


def _row(artifact: compiler_pb2.Artifact) -> tuple[object, ...]:
    if artifact.kind != "engine":
        return (artifact.kind, artifact.model_name, "", "", "", "", "", artifact.size_bytes, artifact.artifact_id)
    backend = word_of(common_pb2.Backend, "BACKEND", artifact.backend)
    layout = word_of(common_pb2.KVLayout, "KV_LAYOUT", artifact.layout)
    dtype = word_of(common_pb2.ElementType, "ELEMENT_TYPE", artifact.dtype)
    return (
        artifact.kind,
        artifact.model_name,
        backend,
        layout,
        dtype,
        artifact.max_len,
        profile_words(artifact.profiles),
        artifact.size_bytes,
        artifact.artifact_id,
    )


@app.command("ls")
def list_artifacts(
    context: typer.Context,
    kind: Annotated[str, typer.Option(help="engine or model")] = "",
    limit: Annotated[int, typer.Option(min=1, max=500)] = 100,
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
    session.print("")
    session.print_table(("file", "sha256", "bytes"), [(f.path, f.sha256, f.size_bytes) for f in artifact.files])
    if artifact.proof:
        session.print("")
        aliased = [(*proof_row(cache), "yes" if cache.aliased else "no") for cache in artifact.proof]
        session.print_table((*PROOF_COLUMNS, "aliased"), aliased)


@app.command()
def verify(context: typer.Context, artifact_id: ArtifactId) -> None:
    """Read every byte of an artifact and compare it with its manifest."""
    session = session_of(context)
    with session.compiler() as stub:
        response = stub.VerifyArtifact(compiler_pb2.VerifyArtifactRequest(artifact_id=artifact_id))
    if session.as_json:
        session.print_json(response)
    else:
        session.print(f"{response.files_checked} files, {response.bytes_checked} bytes: as the manifest says")


@app.command()
def check(context: typer.Context, artifact_id: ArtifactId) -> None:
    """Say whether the runtime's device can run an engine, before it is loaded. Exit code 5 where it cannot."""
    session = session_of(context)
    with session.control() as stub:
        device = stub.GetServerInfo(control_pb2.GetServerInfoRequest()).device
    with session.compiler() as stub:
        found = stub.CheckCompatibility(compiler_pb2.CheckCompatibilityRequest(artifact_id=artifact_id, device=device))
    if session.as_json:
        session.print_json(found)
    level = word_of(compiler_pb2.Compatibility, "COMPATIBILITY", found.compatibility)
    sides = f"{found.field}: the engine has {found.expected}, the runtime's device {found.got}"
    if found.compatibility == compiler_pb2.COMPATIBILITY_UNSUPPORTED:
        details = {"field": found.field, "expected": found.expected, "got": found.got}
        raise EngineIncompatible(f"{level}: {sides}; compile it again for this device", details=details)
    if not session.as_json:
        session.print(f"{level}: {sides}" if found.field else level)


@app.command()
def rm(context: typer.Context, artifact_id: ArtifactId) -> None:
    """Delete an artifact nobody uses."""
    session = session_of(context)
    with session.compiler() as stub:
        response = stub.DeleteArtifact(compiler_pb2.DeleteArtifactRequest(artifact_id=artifact_id))
    if session.as_json:
        session.print_json(response)


@app.command()
def gc(
    context: typer.Context,
    max_age: Annotated[str, typer.Option(help="remove what was not used for so long: 30d, 12h, 90m, 10s")] = "",
    max_bytes: Annotated[str, typer.Option(help="then the least recently used until so much is left: 500MB, 20GiB")] = "",
) -> None:
    """Remove artifacts by age and size, and what crashed writers left; never what is in use."""
    session = session_of(context)
    request = compiler_pb2.CollectGarbageRequest()
    if max_age:
        request.max_age.FromNanoseconds(round(seconds(max_age, "--max-age") * 1e9))
    if max_bytes:
        request.max_bytes = byte_count(max_bytes, "--max-bytes")
    with session.compiler() as stub:
        response = stub.CollectGarbage(request)
    if session.as_json:
        session.print_json(response)
        return
    for artifact_id in response.removed:
        session.print(artifact_id)
    summary = f"{response.freed_bytes} bytes freed, {response.left_bytes} left"
    summary += f"; {len(response.failed)} not removed, the next collection tries again" if response.failed else ""
    session.note(summary)


@app.command()
def sign(
    context: typer.Context,
    artifact_id: ArtifactId,
    key: Annotated[Path, typer.Option(help="PEM file of an Ed25519 private key; it stays on this machine")],
) -> None:
    """Sign an artifact, and the model it needs: a runtime with trusted keys loads nothing else."""
    session = session_of(context)
    try:
        from shared.artifacts.signing import load_private_key, sign_manifest  # an extra: most stores are private
    except ModuleNotFoundError as error:
        raise BackendUnavailable(f"signing needs the extra 'signing' (pip install 'quire[signing]'): {error}") from error
    private_key = load_private_key(key)
    with session.compiler() as stub:
        artifact = stub.GetArtifact(compiler_pb2.GetArtifactRequest(artifact_id=artifact_id)).artifact
        parts = [artifact]
        if artifact.model_id != artifact_id:
            parts.append(stub.GetArtifact(compiler_pb2.GetArtifactRequest(artifact_id=artifact.model_id)).artifact)
        for part in parts:
            signature = sign_manifest(private_key, part.manifest_json)
            stub.SignArtifact(compiler_pb2.SignArtifactRequest(artifact_id=part.artifact_id, signature=signature))
            if session.as_json:
                session.print_json({"artifact_id": part.artifact_id, "signature": signature.decode().strip()})
            else:
                session.print(f"signed {part.kind} {part.artifact_id}")


@app.command("explain-miss")
@takes_spec
def explain_miss(context: typer.Context, spec: compiler_pb2.CompileSpec) -> None:
    """Say which parts of the key keep a compile from reusing an engine of the store. Takes the options of `quire compile`."""
    session = session_of(context)
    with session.compiler() as stub:
        response = stub.ExplainMiss(compiler_pb2.ExplainMissRequest(spec=spec))
    if session.as_json:
        session.print_json(response)
        return
    answer = "hit: a compile reuses it" if response.hit else "miss: a compile builds it"
    session.print(f"{response.artifact_id} {answer}")
    if response.nearest:
        session.print_table(
            ("nearest engine", "differs in"), [(near.artifact_id, ", ".join(near.components)) for near in response.nearest]
        )

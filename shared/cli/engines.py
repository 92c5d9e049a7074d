"""`quire engines`: load, unload, ls."""

from __future__ import annotations

from typing import Annotated

import typer

from shared.cli.options import UINT32_MAX, UINT64_MAX, kv_options, word_of
from shared.cli.session import session_of
from shared.errors import FieldOutOfRange
from shared.pb.quire.v1 import common_pb2, control_pb2

app = typer.Typer(help="Engines of the runtime.", no_args_is_help=True)
COLUMNS = ("name", "model", "backend", "layout", "max_len", "pages", "kv_bytes", "aliased", "artifact")


def _row(engine: control_pb2.Engine) -> tuple[object, ...]:
    backend = word_of(common_pb2.Backend, "BACKEND", engine.backend)
    layout = word_of(common_pb2.KVLayout, "KV_LAYOUT", engine.layout)
    aliased = f"{engine.caches_aliased}/{engine.caches_total}"
    return (
        engine.name,
        engine.model_name,
        backend,
        layout,
        engine.max_len,
        engine.num_pages,
        engine.kv_bytes,
        aliased,
        engine.artifact_id,
    )


@app.command()
def load(
    context: typer.Context,
    artifact_id: Annotated[str, typer.Argument(help="artifact id of an engine")],
    name: Annotated[str, typer.Option(help="name clients use; empty = the id's first 12 digits")] = "",
    pages: Annotated[int | None, typer.Option(min=2, max=UINT32_MAX, help="pages of the KV pools")] = None,
    kv_bytes: Annotated[int | None, typer.Option(min=1, max=UINT64_MAX, help="bytes of the KV pools")] = None,
    compaction: Annotated[str | None, typer.Option(help="default for requests: policy=NAME,budget=N,interval=N")] = None,
    prefix_caching: Annotated[bool, typer.Option(help="go on from what earlier requests have computed")] = True,
) -> None:
    """Load an engine and print its name."""
    session = session_of(context)
    request = control_pb2.LoadEngineRequest(artifact_id=artifact_id, name=name, prefix_caching=prefix_caching)
    if pages is not None and kv_bytes is not None:
        raise FieldOutOfRange("give --pages or --kv-bytes, not both", field="--pages")
    if pages is not None:
        request.num_pages = pages
    if kv_bytes is not None:
        request.kv_bytes = kv_bytes
    options = kv_options(compaction)
    if options.HasField("policy"):
        chosen = options.policy
        request.default_compaction.name = chosen.name
        request.default_compaction.budget = chosen.budget
        request.default_compaction.interval = chosen.interval
        if chosen.HasField("sinks"):
            request.default_compaction.sinks = chosen.sinks
        request.default_compaction.mode = chosen.mode
    with session.control() as stub:
        engine = stub.LoadEngine(request).engine
    if session.as_json:
        session.print_json(engine)
    else:
        session.print(engine.name)


@app.command()
def unload(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="engine name")],
    grace_s: Annotated[int, typer.Option(min=0, max=UINT32_MAX, help="seconds running requests may still take")] = 0,
) -> None:
    """Unload an engine and give its memory back."""
    session = session_of(context)
    request = control_pb2.UnloadEngineRequest(name=name)
    request.grace.seconds = grace_s
    with session.control() as stub:
        response = stub.UnloadEngine(request)
    if session.as_json:
        session.print_json(response)


@app.command("ls")
def list_engines(context: typer.Context) -> None:
    """List loaded engines."""
    session = session_of(context)
    with session.control() as stub:
        response = stub.ListEngines(control_pb2.ListEnginesRequest())
    if session.as_json:
        session.print_json(response)
    else:
        session.print_table(COLUMNS, [_row(engine) for engine in response.engines])

"""`quire`: a pure gRPC client. Everything it knows of models and engines it learns from the two services."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from shared.cli import artifacts, compile, doctor, engines, exit_codes, generate, jobs, up
from shared.cli.session import COMPILER_ADDRESS, RUNTIME_ADDRESS, Output, Session
from shared.errors import FieldOutOfRange, QuireError

app = typer.Typer(
    help="Compile decoder LLMs into engines with proven in-place KV writes, and stream from them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("up")(up.up_command)
app.command("compile")(compile.compile_command)
app.command("explain")(compile.explain_command)
app.command("generate")(generate.generate_command)
app.command("doctor")(doctor.doctor_command)
app.add_typer(jobs.app, name="jobs")
app.add_typer(artifacts.app, name="artifacts")
app.add_typer(engines.app, name="engines")


@app.callback()
def options(
    context: typer.Context,
    output: Annotated[Output, typer.Option(help="text for people, json for programs")] = Output.TEXT,
    compiler_address: Annotated[str, typer.Option(envvar="QUIRE_COMPILER_ADDRESS", help="host:port")] = COMPILER_ADDRESS,
    runtime_address: Annotated[str, typer.Option(envvar="QUIRE_RUNTIME_ADDRESS", help="host:port")] = RUNTIME_ADDRESS,
    ca: Annotated[Path | None, typer.Option(envvar="QUIRE_CA", help="PEM roots; turns TLS on")] = None,
    certificate: Annotated[Path | None, typer.Option(envvar="QUIRE_CERTIFICATE", help="client certificate (mTLS)")] = None,
    key: Annotated[Path | None, typer.Option(envvar="QUIRE_KEY", help="client key (mTLS)")] = None,
    token: Annotated[str | None, typer.Option(envvar="QUIRE_TOKEN", help="bearer token")] = None,
) -> None:
    context.obj = Session(output, compiler_address, runtime_address, ca, certificate, key, token)


def hoist_output(arguments: list[str]) -> list[str]:
    """`--output X` may stand anywhere on the line; typer wants it before the command."""
    rest = list(arguments)
    for i, word in enumerate(rest):
        if word == "--":
            break
        if word == "--output" and i + 1 < len(rest):
            return rest[i : i + 2] + rest[:i] + rest[i + 2 :]
        if word.startswith("--output="):
            return [rest.pop(i), *rest]
    return rest


def check_text(arguments: list[str]) -> None:
    """FieldOutOfRange for a word that is no UTF-8: no message can carry it."""
    for word in arguments:
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise FieldOutOfRange(f"the command line must be valid UTF-8; got {word[:40]!r}") from error


def main() -> None:
    """Entry point."""
    arguments = hoist_output(sys.argv[1:])
    as_json = arguments[:2] == ["--output", "json"] or arguments[:1] == ["--output=json"]
    with told_in_one_line(as_json):
        check_text(arguments)
        app(arguments, prog_name="quire")


@contextlib.contextmanager
def told_in_one_line(as_json: bool) -> Iterator[None]:
    """Every error of ours ends the process with one line on standard error and an exit code by its class."""
    try:
        yield
    except QuireError as error:
        _fail(error, as_json)
    except KeyboardInterrupt:
        sys.exit(exit_codes.INTERRUPTED)


def _fail(error: QuireError, as_json: bool) -> None:
    if as_json:
        facts = {"reason": error.reason, "field": error.field, "message": error.message, "details": error.details}
        line = json.dumps({"error": facts | {"retryable": error.retryable}}, ensure_ascii=False)
    else:
        field = f" ({error.field})" if error.field else ""
        line = f"quire: {error.reason}{field}: {error.message}"
    sys.stderr.write(line + "\n")
    sys.exit(exit_codes.exit_code(error))


if __name__ == "__main__":
    main()

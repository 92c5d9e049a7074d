"""What to compile, as options: the same of every command that takes them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from shared.cli.options import UINT32_MAX, compile_spec, target_words
from shared.pb.quire.v1 import compiler_pb2


def _spec(
    source: Annotated[str, typer.Argument(help="Hugging Face directory, .gguf file or exported .pt2 program")],
    backend: Annotated[str, typer.Option(help="inductor, tensorrt_rtx or tensorrt")] = "inductor",
    layout: Annotated[str, typer.Option(help="paged or linear")] = "paged",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
    max_len: Annotated[int, typer.Option(min=1, max=UINT32_MAX, help="most KV entries one sequence holds at once")] = 2048,
    page_size: Annotated[int, typer.Option(min=1, max=UINT32_MAX, help="tokens a page (paged layout)")] = 16,
    profile: Annotated[list[str] | None, typer.Option(help="NAME=BATCHxLENGTH, repeatable, in order")] = None,
    target: Annotated[str, typer.Option(help="GPUs to build for, such as sm80,sm89; empty = this host's CPU (inductor)")] = "",
    allow_copying: Annotated[bool, typer.Option(help="copy caches whose writes are not proven, instead of refusing")] = False,
    constant_weights: Annotated[bool, typer.Option(help="TensorRT: hold the weights in the engine, shared with no other")] = False,
) -> compiler_pb2.CompileSpec:
    return compile_spec(
        source,
        backend,
        layout,
        dtype,
        max_len,
        page_size,
        profile or (),
        target_words(target),
        allow_copying=allow_copying,
        constant_weights=constant_weights,
    )


def takes_spec(command: Callable[..., None]) -> Callable[..., None]:
    """`command(context, spec, ...)` as a command of the command line: the options above take the place of `spec`."""
    options = inspect.signature(_spec, eval_str=True).parameters
    context, _, *own = inspect.signature(command, eval_str=True).parameters.values()
    parameters = [context, *options.values(), *own]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        spec = _spec(**{name: given.pop(name) for name in options})
        command(spec=spec, **given)

    # typer reads a command's options off its signature and its annotations.
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # a function takes any attribute
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run

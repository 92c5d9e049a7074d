"""Two runtimes behind one address: `python -m tests.gpu.replicas_check DATA [--devices 0,1] [--json FILE]`.

DATA is the data directory of services that have compiled SmolLM2 (serving_check leaves one). Requests at random moments must
get eager transformers' tokens, each replica must have served its share, SIGTERM must end all with exit code 0, and the death of
a replica must end the front. `--devices cpu,cpu` tries the same without a GPU. Exit code 1 if something does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import torch

from shared.artifacts.local import LocalStore
from shared.cli.session import Output, Session
from shared.manifest import decode_engine_manifest
from shared.pb.quire.v1 import control_pb2, control_pb2_grpc
from tests.bench.machine import write_json
from tests.e2e.conftest import Quire, in_parallel
from tests.e2e.hf_oracle import Oracle
from tests.e2e.test_tokens_equal_transformers import MAX_TOKENS, PROMPTS

NUM_PAGES, NUM_PROMPTS, REQUESTS_A_SECOND = 512, 8, 50.0


@contextmanager
def front(data: Path, store: Path, devices: str) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    environment = os.environ | {
        "QUIRE_DATA": str(data),
        "QUIRE_RUNTIME_STORE": str(store),
        "QUIRE_RUNTIME_ADDRESS": "127.0.0.1:0",
    }
    command = [sys.executable, "-m", "runtime_service.replicas", "--devices", devices]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())
    finally:
        for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
            child.kill()
        process.kill()
        process.wait()


def tokens_of(address: str) -> int:
    with grpc.insecure_channel(address) as channel:
        (load,) = control_pb2_grpc.ControlStub(channel).GetLoad(control_pb2.GetLoadRequest()).engines
    return load.generated_tokens


def least_share(shares: list[int]) -> int:
    """Half of what each would have of equal shares."""
    return sum(shares) // len(shares) // 2


def check(data: Path, scratch: Path, devices: str, requests: int) -> dict[str, list[Any]]:
    """Rows of the table: check -> [got, wanted]."""
    store = LocalStore(data / "artifacts")
    manifests = [decode_engine_manifest(store.manifest(info.artifact_id)) for info in store.list("engine")]
    wanted_device = "cpu" if "cpu" in devices else "cuda"
    engine = next(m for m in manifests if m.target.device == wanted_device and m.model.num_layers == 30 and m.cache.page_size < 100)
    with store.open(engine.model.model_id) as model:
        oracle = Oracle(model.path("config.json").parent)
    with torch.device(wanted_device):
        oracle.model.to(wanted_device)
        prompts = [oracle.tokenizer.encode(text) for text in PROMPTS[:NUM_PROMPTS]]
        expected = [oracle.greedy(prompt, MAX_TOKENS).tokens for prompt in prompts]
    rng = random.Random(5)
    wanted = [(rng.randrange(len(prompts)), rng.randint(1, MAX_TOKENS)) for _ in range(requests)]
    rows: dict[str, list[Any]] = {}
    with front(scratch, data / "artifacts", devices) as (process, ready):
        quire = Quire(Session(Output.TEXT, "", ready["address"], None, None, None, None), process)
        quire.load(engine.artifact_id, "smollm2", NUM_PAGES)
        calls: list[Callable[[], object]] = [
            lambda i=i, n=n: quire.greedy("smollm2", prompts[i], n).tokens == expected[i][:n] for i, n in wanted
        ]
        delays = [rng.uniform(0, requests / REQUESTS_A_SECOND) for _ in calls]
        rows["right answers"] = [sum(map(bool, in_parallel(calls, delays))), requests]
        shares = [tokens_of(address) for address in ready["replicas"]]
        rows["tokens of each"] = [shares, f"at least {least_share(shares)}"]
        process.send_signal(signal.SIGTERM)
        rows["exit code after SIGTERM"] = [process.wait(timeout=60), 0]
    with front(scratch, data / "artifacts", devices) as (process, ready):
        psutil.Process(process.pid).children()[0].kill()
        rows["front after a replica's death"] = ["ended" if process.wait(timeout=60) else "served on", "ended"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--devices", default="0,1")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--json", type=Path, default=Path(os.environ.get("OUT", ".")) / "replicas.json")
    parser.add_argument("--scratch", type=Path, default=Path("/tmp/quire-replicas-check"))
    arguments = parser.parse_args()
    rows = check(arguments.data, arguments.scratch, arguments.devices, arguments.requests)
    held = {name: got == wanted for name, (got, wanted) in rows.items()}
    shares = rows["tokens of each"][0]
    held["tokens of each"] = min(shares) >= least_share(shares)
    for name, row in rows.items():
        print(f"{'ok ' if held[name] else 'BAD'} {name}: {row[0]} (wanted {row[1]})", flush=True)
    write_json(arguments.json, rows)
    sys.exit(not all(held.values()))


if __name__ == "__main__":
    main()

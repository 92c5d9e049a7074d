"""Both services over a real Redis and a bucket: compiled on one host, served on another, brought back after kill -9.

The one real build of a tiny decoder that CI makes through the service's own processes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from tokenizers import Tokenizer
from transformers import PreTrainedModel
from typer.testing import CliRunner

from compiler_service.worker.process_tree import process_tree, read_stat
from shared.cli.exit_codes import EXIT_CODES
from shared.cli.main import app
from shared.cli.session import Output, Session
from shared.errors import Unavailable
from shared.manifest import decode_engine_manifest
from shared.pb.quire.v1 import compiler_pb2, control_pb2
from tests.e2e.conftest import Quire, start_quire, stop_quire
from tests.support.artifact_stores import BUCKET, s3_environment, s3_server
from tests.support.redis_server import RedisServer
from tests.support.sources import write_checkpoint

PROMPT, MAX_TOKENS = [0, 17, 4, 99, 23], 24
STAGES = ["fetch", "load", "export", "lower", "prove", "build", "verify", "publish"]
SPEC = {"max_len": 64, "page_size": 8, "profiles": ("decode=4x1", "prefill=3x16")}
PROFILES = ("--profile", "decode=4x1", "--profile", "prefill=3x16")


@dataclass
class Hosts:
    """A Redis, a bucket, a checkpoint, and a directory for the data of each host."""

    root: Path
    options: tuple[str, ...]
    expected: list[int]
    artifact_id: str = ""

    @property
    def checkpoint(self) -> Path:
        return self.root / "tiny"

    @contextmanager
    def up(self, **environment: str) -> Iterator[Quire]:
        roots = {"QUIRE_COMPILER_MODEL_ROOTS": str(self.root)}
        quire = start_quire(self.root / "one", roots | environment, self.options)
        try:
            yield quire
        finally:
            quire.process.terminate()
            quire.process.wait(timeout=90)


def greedy(model: PreTrainedModel, prompt: list[int], length: int, num_tokens: int) -> list[int]:
    """Eager transformers without a cache, choosing among the `num_tokens` ids that the tokenizer has."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(length):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1, :num_tokens].argmax()))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    root = tmp_path_factory.mktemp("hosts")
    server = RedisServer()
    with s3_server() as url, pytest.MonkeyPatch.context() as environment:
        for name, value in s3_environment(url).items():
            environment.setenv(name, value)
        model = write_checkpoint(root / "tiny")
        options = ("--redis", server.url, "--store", f"s3://{BUCKET}/e2e")
        num_tokens = Tokenizer.from_file(str(root / "tiny" / "tokenizer.json")).get_vocab_size()
        yield Hosts(root, options, greedy(model, PROMPT, MAX_TOKENS, num_tokens))
    server.close()


def cli(quire: Quire, *arguments: str) -> list[dict]:
    session = quire.session
    where = ("--output", "json", "--compiler-address", session.compiler_address, "--runtime-address", session.runtime_address)
    result = CliRunner().invoke(app, [*where, *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.output.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def keys(hosts: Hosts) -> dict[str, Path]:
    """A signer's key pair and a stranger's public key, as PEM files."""
    signer, stranger = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    files = {name: hosts.root / f"{name}.pem" for name in ("private", "public", "stranger")}
    files["private"].write_bytes(signer.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    for name, key in (("public", signer), ("stranger", stranger)):
        files[name].write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return files


def test_a_checkpoint_becomes_an_engine_in_the_bucket_and_streams(hosts: Hosts, keys: dict[str, Path]) -> None:
    with hosts.up() as quire:
        job = quire.compile(hosts.checkpoint, **SPEC)
        hosts.artifact_id = job.artifact_id
        check_history(quire, job.job_id)
        check_manifest(quire.artifact(job.artifact_id))
        assert not (hosts.root / "one" / "artifacts").exists(), "nothing is kept beside the bucket but its cache"
        # Another process (with another hash seed) comes to the same key.
        (answer,) = cli(quire, "artifacts", "explain-miss", str(hosts.checkpoint), "--max-len", "64", "--page-size", "8", *PROFILES)
        assert (answer["artifact_id"], answer["hit"], answer["nearest"]) == (job.artifact_id, True, [])
        assert not list((hosts.root / "one" / "builds").iterdir()), "neither scratch nor log of a build that went well"

        quire.load(job.artifact_id, "chat", num_pages=33)
        assert quire.greedy("chat", PROMPT, MAX_TOKENS).tokens == hosts.expected
        (collected,) = cli(quire, "artifacts", "gc", "--max-bytes", "0")
        assert (collected["removed"], collected["failed"]) == ([], []), "the engine is loaded and needs its model"
        assert cli(quire, "artifacts", "verify", job.artifact_id)[0]["files_checked"] > 1
        signed = cli(quire, "artifacts", "sign", job.artifact_id, "--key", str(keys["private"]))
        assert [part["artifact_id"] for part in signed] == [job.artifact_id, quire.artifact(job.artifact_id).model_id]

        (runtime,) = (stat.pid for stat in process_tree(read_stat(quire.process.pid)) if is_runtime(stat.pid))
        os.kill(runtime, signal.SIGKILL)
        assert quire.process.wait(timeout=90) == EXIT_CODES[Unavailable], "`quire up` says that a service died"


def check_history(quire: Quire, job_id: str) -> None:
    with quire.session.compiler() as stub:
        events = [r.event for r in stub.WatchCompileJob(compiler_pb2.WatchCompileJobRequest(job_id=job_id))]
        job = stub.GetCompileJob(compiler_pb2.GetCompileJobRequest(job_id=job_id)).job
    seen = [compiler_pb2.BuildStage.Name(event.stage).removeprefix("BUILD_STAGE_").lower() for event in events if event.stage]
    assert list(dict.fromkeys(seen)) == STAGES
    assert (job.attempt, job.reused) == (1, False)
    assert max(event.rss_bytes for event in events) > 100 << 20


def check_manifest(artifact: compiler_pb2.Artifact) -> None:
    manifest = decode_engine_manifest(artifact.manifest_json)
    assert [c.verdict_after for c in manifest.proof] == ["proved"] * 4
    assert all(c.aliased and c.binding for c in manifest.proof)
    assert manifest.constants


def is_runtime(pid: int) -> bool:
    return b"runtime_service" in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_what_was_loaded_is_served_again_after_kill_9(hosts: Hosts, keys: dict[str, Path]) -> None:
    with hosts.up(QUIRE_RUNTIME_TRUSTED_KEYS=str(keys["public"])) as quire:
        with quire.session.control() as stub:
            (engine,) = stub.ListEngines(control_pb2.ListEnginesRequest()).engines
        assert (engine.name, engine.artifact_id, engine.num_pages) == ("chat", hosts.artifact_id, 33)
        assert quire.greedy("chat", PROMPT, MAX_TOKENS).tokens == hosts.expected
        assert quire.compile(hosts.checkpoint, **SPEC).artifact_id == hosts.artifact_id
        assert stop_quire(quire) == 0


def start_runtime(hosts: Hosts, trusted: Path) -> subprocess.Popen[str]:
    """A runtime alone, on a host whose cache is empty."""
    engines = json.dumps([{"artifact_id": hosts.artifact_id, "name": "chat", "num_pages": 33}])
    environment = {
        "QUIRE_DATA": str(hosts.root / "two"),
        "QUIRE_RUNTIME_ADDRESS": "127.0.0.1:0",
        "QUIRE_RUNTIME_STORE": hosts.options[-1],
        "QUIRE_RUNTIME_ENGINES": engines,
        "QUIRE_RUNTIME_TRUSTED_KEYS": str(trusted),
    }
    command = [sys.executable, "-m", "runtime_service"]
    return subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_another_host_serves_it_from_its_start_on(hosts: Hosts, keys: dict[str, Path]) -> None:
    process = start_runtime(hosts, keys["public"])
    try:
        address = json.loads(process.stdout.readline())["address"]
        session = Session(Output.TEXT, "127.0.0.1:1", address, None, None, None, None)
        assert Quire(session, process).greedy("chat", PROMPT, MAX_TOKENS).tokens == hosts.expected
    finally:
        process.terminate()
        process.communicate(timeout=90)
    assert process.returncode == 0


def test_a_host_that_trusts_another_key_refuses_it(hosts: Hosts, keys: dict[str, Path]) -> None:
    process = start_runtime(hosts, keys["stranger"])
    _, log = process.communicate(timeout=90)
    assert process.returncode == 1
    assert "is required to load an artifact; it is signed by key" in log

"""Every hostile call gets its typed error within a second, and both servers go on as if nothing had been."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared.pb.quire.v1 import control_pb2
from shared.rpc.status import from_rpc_error
from tests.contract.compiler.conftest import start  # noqa: F401 - a fixture
from tests.contract.hostile.calls import CALLS, COMPILER, Call
from tests.contract.runtime.conftest import PAGED_ID, generate, serve, tokens_of
from tests.support.tiny_engine import Oracle

DEADLINE_S = 1.0
MOST_MEMORY_BYTES = 192 << 20
"""What the corpus may cost both ends of every call, which share this process: a few messages of the greatest size and a million
Python objects made of one, not a share of what they claim."""
AS_ADMIN = [("authorization", "Bearer admin")]
STREAMING = ("Generate", "WatchCompileJob")


def token_file(directory: Path) -> Path:
    scopes = {"admin": "admin", "infer": "infer", "control": "control", "compile": "compile", "expired": "admin"}
    tokens = [
        {
            "name": secret,
            "sha256": hashlib.sha256(secret.encode()).hexdigest(),
            "scopes": [scope],
            "expires_at": 1.0 if secret == "expired" else None,
        }
        for secret, scope in scopes.items()
    ]
    path = directory / "tokens.json"
    path.write_text(json.dumps({"tokens": tokens}))
    return path


def lay_traps(models: Path) -> None:
    """What the sources of the corpus name."""
    os.mkfifo(models / "pipe.gguf")
    (models / "loop").symlink_to("loop")
    (models / "out").symlink_to("/etc")
    bomb = b'{"weight_map":' + b"[" * (9 << 20)
    for name, files in {
        "piped": {"model.safetensors": b"x", "tokenizer.json": b"{}"},
        "indexed": {"model.safetensors.index.json": bomb, "config.json": b"{}", "tokenizer.json": b"{}"},
        "climbing": {"model.safetensors.index.json": b'{"weight_map": {"a": "../../../etc/passwd"}}'},
    }.items():
        (models / name).mkdir()
        for file, content in files.items():
            (models / name / file).write_bytes(content)
    os.mkfifo(models / "piped" / "config.json")


async def outcome(channel: grpc.aio.Channel, call: Call) -> str:
    """The reason it failed for. A call that lasts longer than its deadline fails for that."""
    headers = [*call.headers, *([("authorization", f"Bearer {call.token}")] if call.token is not None else [])]
    try:
        if call.method.endswith(STREAMING):
            await channel.unary_stream(call.method)(call.payload, metadata=headers, timeout=DEADLINE_S).read()
        else:
            await channel.unary_unary(call.method)(call.payload, metadata=headers, timeout=DEADLINE_S)
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error).reason
    return "accepted"


def peak_bytes() -> int:
    """The most this process has held since `forget_peak`."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def test_the_corpus_is_large_and_its_names_tell_its_inputs_apart():
    assert len({call.name for call in CALLS}) == len(CALLS) >= 60


@pytest.fixture
async def servers(tmp_path, start):  # noqa: F811
    tokens = token_file(tmp_path)
    async with contextlib.AsyncExitStack() as stack:
        runtime = await stack.enter_async_context(serve(tmp_path / "runtime", tokens=tokens))
        compiler = await stack.enter_async_context(start(tokens=tokens))
        lay_traps(compiler.models)
        channels = {
            "runtime": await stack.enter_async_context(grpc.aio.insecure_channel(runtime.runtime.address)),
            "compiler": await stack.enter_async_context(grpc.aio.insecure_channel(compiler.compiler.address)),
        }
        load = control_pb2.LoadEngineRequest(artifact_id=PAGED_ID, name="tiny", num_pages=65)
        await runtime.control.LoadEngine(load, metadata=AS_ADMIN)
        yield runtime, compiler, channels


async def test_every_call_is_refused_by_its_reason_and_the_servers_live(servers):
    runtime, compiler, channels = servers
    await outcome(channels["runtime"], CALLS[0])
    forget_peak()
    before = peak_bytes()
    wrong = {}
    for call in CALLS:
        channel = channels["compiler" if call.method.startswith(COMPILER) else "runtime"]
        if (got := await outcome(channel, call)) not in call.reasons:
            wrong[call.name] = got
    assert wrong == {}
    grown = peak_bytes() - before
    print(f"\n{len(CALLS)} hostile calls; at most {grown >> 20} MiB more than before")
    assert grown < MOST_MEMORY_BYTES

    for channel in channels.values():
        check = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="liveness"))
        assert check.status == health_pb2.HealthCheckResponse.SERVING
    events = [event async for event in runtime.inference.Generate(generate([3, 1, 4], 8), metadata=AS_ADMIN)]
    assert tokens_of(events) == Oracle().expected_tokens([3, 1, 4], 8)
    assert (await runtime.until_ended(1)).pages_leaked == 0, "the one sound request is all there was"
    assert not any((await compiler.compiler._queue.count()).values()), "no hostile job was accepted"

"""`quire artifacts check`: the runtime's device, the compiler's answer, an exit code by class."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from typer.testing import CliRunner

from shared.cli.main import app
from shared.errors import EngineIncompatible
from shared.pb.quire.v1 import compiler_pb2, compiler_pb2_grpc, control_pb2, control_pb2_grpc

ENGINE = "e" * 64


class _Runtime(control_pb2_grpc.ControlServicer):
    def GetServerInfo(self, request, context):
        device = compiler_pb2.DeviceDescription(kind="cuda", compute_capability="sm90")
        return control_pb2.GetServerInfoResponse(device=device)


class _Compiler(compiler_pb2_grpc.CompilerServicer):
    def __init__(self, answer):
        self.answer = answer

    def CheckCompatibility(self, request, context):
        assert (request.artifact_id, request.device.compute_capability) == (ENGINE, "sm90")
        return self.answer


def check(answer: compiler_pb2.CheckCompatibilityResponse, *options: str):
    server = grpc.server(ThreadPoolExecutor(2))
    control_pb2_grpc.add_ControlServicer_to_server(_Runtime(), server)
    compiler_pb2_grpc.add_CompilerServicer_to_server(_Compiler(answer), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        where = ["--compiler-address", address, "--runtime-address", address]
        return CliRunner().invoke(app, [*where, *options, "artifacts", "check", ENGINE])
    finally:
        server.stop(None)


def answered(level: str, field: str = "") -> compiler_pb2.CheckCompatibilityResponse:
    value = compiler_pb2.Compatibility.Value(f"COMPATIBILITY_{level}")
    return compiler_pb2.CheckCompatibilityResponse(compatibility=value, field=field, expected="sm80", got="sm90")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (answered("OPTIMAL"), "optimal\n"),
        (
            answered("PREFER_RECOMPILE", "target.compute_capabilities"),
            "prefer_recompile: target.compute_capabilities: the engine has sm80, the runtime's device sm90\n",
        ),
    ],
)
def test_an_engine_that_runs_is_told_how_well(answer, said):
    result = check(answer)
    assert (result.exit_code, result.stdout) == (0, said)


def test_an_engine_that_does_not_is_an_error_with_both_sides():
    result = check(answered("UNSUPPORTED", "target.device"), "--output", "json")
    assert isinstance(result.exception, EngineIncompatible)
    assert result.exception.details == {"field": "target.device", "expected": "sm80", "got": "sm90"}
    assert json.loads(result.stdout)["compatibility"] == "COMPATIBILITY_UNSUPPORTED"

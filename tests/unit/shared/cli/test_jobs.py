"""What `quire jobs cancel` says of a job that has ended, and of one whose build is still to be stopped."""

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from typer.testing import CliRunner

from shared.cli.main import app
from shared.pb.quire.v1 import compiler_pb2, compiler_pb2_grpc


class _Compiler(compiler_pb2_grpc.CompilerServicer):
    def __init__(self, state):
        self.state = state

    def CancelCompileJob(self, request, context):
        job = compiler_pb2.CompileJob(job_id=request.job_id, state=self.state)
        return compiler_pb2.CancelCompileJobResponse(job=job)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("JOB_STATE_RUNNING", "running, its build is being ended\n"),
        ("JOB_STATE_CANCELLED", "cancelled\n"),
        ("JOB_STATE_SUCCEEDED", "succeeded\n"),
    ],
)
def test_a_cancelled_job_is_told_as_it_is(state, said):
    server = grpc.server(ThreadPoolExecutor(2))
    compiler_pb2_grpc.add_CompilerServicer_to_server(_Compiler(state), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        result = CliRunner().invoke(app, ["--compiler-address", address, "jobs", "cancel", "a"], catch_exceptions=False)
    finally:
        server.stop(None)
    assert result.stdout == said

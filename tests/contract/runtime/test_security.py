"""A runtime as production runs it, by its settings: TLS, tokens, reflection, a health port apart, metrics."""

from __future__ import annotations

import contextlib

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from shared.errors import FieldOutOfRange
from shared.pb.quire.v1 import control_pb2, control_pb2_grpc
from shared.rpc.status import from_rpc_error
from tests.contract.hostile.test_calls import token_file
from tests.contract.runtime.conftest import serve
from tests.support.certificates import authority
from tests.support.scrape import scrape

SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture
def secured(tmp_path, unused_tcp_port):
    """(settings, the right authority, another one)."""
    (certificate, key), (other, _) = authority("ours"), authority("theirs")
    files = {"tls_certificate": certificate, "tls_key": key}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    settings = {name: tmp_path / name for name in files} | {
        "tokens": token_file(tmp_path),
        "reflection": True,
        "health_address": f"127.0.0.1:{unused_tcp_port}",
        "metrics_address": "127.0.0.1:0",
    }
    return settings, certificate, other


@contextlib.asynccontextmanager
async def trusting(served, roots, token=None):
    """A stub and the metadata for it."""
    target = "localhost:" + served.runtime.address.rpartition(":")[2]
    async with grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(roots)) as channel:
        yield channel, [("authorization", f"Bearer {token}")] if token else []


async def outcome(channel, metadata):
    try:
        await control_pb2_grpc.ControlStub(channel).GetLoad(control_pb2.GetLoadRequest(), metadata=metadata, timeout=10)
    except grpc.aio.AioRpcError as error:
        return error.code(), from_rpc_error(error).reason
    return grpc.StatusCode.OK, ""


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        ("control", (grpc.StatusCode.OK, "")),
        ("admin", (grpc.StatusCode.OK, "")),
        (None, (grpc.StatusCode.UNAUTHENTICATED, "TOKEN_INVALID")),
        ("expired", (grpc.StatusCode.UNAUTHENTICATED, "TOKEN_INVALID")),
        ("infer", (grpc.StatusCode.PERMISSION_DENIED, "SCOPE")),
    ],
)
async def test_tokens_over_tls(tmp_path, secured, token, expected):
    settings, ours, _ = secured
    async with serve(tmp_path, **settings) as served, trusting(served, ours, token) as (channel, metadata):
        assert await outcome(channel, metadata) == expected


async def test_what_each_port_says_to_whom(tmp_path, secured):
    settings, ours, theirs = secured
    async with serve(tmp_path, **settings) as served:
        async with trusting(served, theirs, "admin") as (channel, metadata):
            assert (await outcome(channel, metadata))[0] is grpc.StatusCode.UNAVAILABLE, "the server is not who it must be"
        assert (await outcome(served.channel, []))[0] is grpc.StatusCode.UNAVAILABLE, "plaintext to a TLS port"

        async with trusting(served, ours) as (channel, _):
            asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol="quire.v1.Inference")
            answer = await reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([asked])).read()
            assert answer.file_descriptor_response.file_descriptor_proto, "reflection needs no token"
            check = health_pb2.HealthCheckRequest(service="liveness")
            assert (await health_pb2_grpc.HealthStub(channel).Check(check)).status == SERVING
        async with grpc.aio.insecure_channel(settings["health_address"]) as channel:
            assert (await health_pb2_grpc.HealthStub(channel).Check(check)).status == SERVING
            unimplemented = await outcome(channel, [("authorization", "Bearer admin")])
            assert unimplemented[0] is grpc.StatusCode.UNIMPLEMENTED
        assert (await scrape(served.runtime.metrics.address))("quire_runtime_draining") == 0


async def test_a_public_address_needs_tls_or_a_word(tmp_path, secured):
    settings, _, _ = secured
    without = {name: value for name, value in settings.items() if not name.startswith("tls_")}
    with pytest.raises(FieldOutOfRange, match="loopback"):
        async with serve(tmp_path, **(without | {"address": "0.0.0.0:0"})):
            pass
    async with serve(tmp_path, **(settings | {"address": "0.0.0.0:0", "metrics_address": "0.0.0.0:0"})) as served:
        port = served.runtime.metrics.address.rpartition(":")[2]
        assert (await scrape(f"127.0.0.1:{port}"))("quire_runtime_draining") == 0

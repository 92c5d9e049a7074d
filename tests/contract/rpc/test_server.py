"""A real server of ours on loopback: error mapping, health, bind rules."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared import errors
from shared.pb.quire.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from shared.rpc import channel as channels
from shared.rpc import server as servers
from shared.rpc.status import from_rpc_error


class Panic(BaseException):
    """What a library written in Rust raises where it panics."""


class Controls(control_pb2_grpc.ControlServicer):
    async def GetLoad(self, request, context):
        raise errors.KVExhausted("12 pages wanted, 3 free", retry_after_s=3)

    async def ListEngines(self, request, context):
        raise ZeroDivisionError("a secret of the host")

    async def Drain(self, request, context):
        raise Panic("a secret of the host")

    async def GetServerInfo(self, request, context):
        return control_pb2.GetServerInfoResponse(version=dict(context.invocation_metadata()).get("authorization", ""))


class Inferences(inference_pb2_grpc.InferenceServicer):
    async def Generate(self, request, context):
        yield inference_pb2.GenerateResponse(accepted=inference_pb2.Accepted(prompt_tokens=1))
        raise Panic("a secret of the host") if request.engine == "panics" else errors.Draining("going down")


@pytest.fixture
async def address():
    server = servers.Server(servers.ServerOptions("127.0.0.1:0", reflection=True), ["quire.v1.Control"])
    control_pb2_grpc.add_ControlServicer_to_server(Controls(), server.grpc)
    inference_pb2_grpc.add_InferenceServicer_to_server(Inferences(), server.grpc)
    yield await server.start(), server
    await server.stop(0)


async def test_typed_and_untyped_errors_become_statuses(address):
    async with grpc.aio.insecure_channel(address[0]) as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetLoad(control_pb2.GetLoadRequest())
        error = from_rpc_error(caught.value)
        assert (type(error), error.retry_after_s) == (errors.KVExhausted, 3)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListEngines(control_pb2.ListEnginesRequest())
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in caught.value.details()
        assert from_rpc_error(caught.value).details["incident"] in caught.value.details()


async def test_a_panic_is_a_status_and_not_a_call_without_an_end(address):
    async with grpc.aio.insecure_channel(address[0]) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await control_pb2_grpc.ControlStub(channel).Drain(control_pb2.DrainRequest(), timeout=20)
        call = inference_pb2_grpc.InferenceStub(channel).Generate(inference_pb2.GenerateRequest(engine="panics"), timeout=20)
        assert (await call.read()).accepted.prompt_tokens == 1
        with pytest.raises(grpc.aio.AioRpcError) as stream:
            await call.read()
        for caught in (unary, stream):
            assert caught.value.code() is grpc.StatusCode.INTERNAL
            assert "secret" not in caught.value.details()


@pytest.mark.parametrize("garbage", [b"\x0a\x02\xff\xfe", b"\xff\xff\xff", b"\x0a\x7f"], ids=["bad UTF-8", "no tag", "truncated"])
async def test_a_request_that_is_no_message_is_the_callers_error(address, garbage):
    """BR-161: protobuf garbage and invalid UTF-8 are INVALID_ARGUMENT, for unary calls and streams."""
    async with grpc.aio.insecure_channel(address[0]) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/quire.v1.Control/Abort")(garbage)
        assert type(from_rpc_error(caught.value)) is errors.FieldOutOfRange
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_stream("/quire.v1.Inference/Generate")(garbage).read()
        assert type(from_rpc_error(caught.value)) is errors.FieldOutOfRange


async def test_a_stream_that_fails_keeps_what_it_sent(address):
    async with grpc.aio.insecure_channel(address[0]) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(inference_pb2.GenerateRequest())
        assert (await call.read()).accepted.prompt_tokens == 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert type(from_rpc_error(caught.value)) is errors.Draining


async def test_not_serving_is_sticky_in_shutdown(address):
    """BR-159: a late 'model loaded' does not turn health back."""
    where, server = address
    await server.set_ready(True)
    async with grpc.aio.insecure_channel(where) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def check(name):
            return (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status

        assert await check("readiness") == health_pb2.HealthCheckResponse.SERVING
        await server.begin_shutdown()
        await server.set_ready(True)
        for name in ("", "readiness", "quire.v1.Control"):
            assert await check(name) == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_token_reaches_the_server(address):
    options = channels.ChannelOptions(address[0], token="t0ken")

    def call():
        with channels.connect(options) as channel:
            return control_pb2_grpc.ControlStub(channel).GetServerInfo(control_pb2.GetServerInfoRequest()).version

    assert await asyncio.to_thread(call) == "Bearer t0ken"


async def test_calls_of_one_client_reach_every_address(address):
    """BR-169: one connection to one pod would leave the others idle."""
    called = []
    other = servers.Server(servers.ServerOptions("127.0.0.1:0"), [], on_call=lambda *call: called.append(call))
    control_pb2_grpc.add_ControlServicer_to_server(Controls(), other.grpc)
    both = f"ipv4:{address[0]},{await other.start()}"

    def call_until_the_other_answers():
        with channels.connect(channels.ChannelOptions(both)) as channel:
            while not called:
                control_pb2_grpc.ControlStub(channel).GetServerInfo(control_pb2.GetServerInfoRequest())

    await asyncio.to_thread(call_until_the_other_answers)
    await other.stop(0)


@pytest.mark.parametrize("where", ["0.0.0.0:0", "10.1.2.3:50051", "[::]:1", "example.com:1"])
def test_public_plaintext_is_refused_without_the_flag(where):
    with pytest.raises(errors.FieldOutOfRange, match="TLS"):
        servers.ServerOptions(where)
    servers.ServerOptions(where, allow_plaintext=True)
    with pytest.raises(errors.FieldOutOfRange, match="TLS"):
        channels.connect(channels.ChannelOptions(where, token="t"))


@pytest.mark.parametrize("where", ["127.0.0.1:0", "localhost:1", "[::1]:5", "unix:/tmp/x"])
def test_loopback_is_fine(where):
    servers.ServerOptions(where)


@pytest.mark.parametrize("file", [None, b"", b"-----BEGIN CERTIFICATE-----\nnone\n-----END CERTIFICATE-----\n"])
async def test_tls_files_that_are_none_are_a_typed_error(tmp_path, file):
    if file is not None:
        (tmp_path / "tls.pem").write_bytes(file)
    tls = servers.TlsFiles(tmp_path / "tls.pem", tmp_path / "tls.pem")
    server = servers.Server(servers.ServerOptions("127.0.0.1:0", tls=tls), [])
    with pytest.raises(errors.FieldOutOfRange, match="as PEM files"):
        await server.start()
    await server.stop(0)


async def test_an_address_in_use_is_a_typed_error(address):
    server = servers.Server(servers.ServerOptions(address[0]), [])
    with pytest.raises(errors.FieldOutOfRange, match="in use"):
        await server.start()
    await server.stop(0)


def test_clients_ping_no_more_often_than_servers_allow():
    """BR-154: one constant serves both sides."""
    assert channels.KEEPALIVE_TIME_MS == servers.KEEPALIVE_TIME_MS


async def test_the_health_port_answers_health_and_nothing_else(unused_tcp_port):
    where = f"127.0.0.1:{unused_tcp_port}"
    server = servers.Server(servers.ServerOptions("127.0.0.1:0", health_address=where), [])
    control_pb2_grpc.add_ControlServicer_to_server(Controls(), server.grpc)
    await server.start()
    await server.set_ready(True)
    async with grpc.aio.insecure_channel(where) as channel:
        response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="readiness"))
        assert response.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await control_pb2_grpc.ControlStub(channel).GetServerInfo(control_pb2.GetServerInfoRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await server.stop(0)

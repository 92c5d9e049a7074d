"""Tokens over a real server: unknown, expired, wrong scope, right; TLS with the wrong authority."""

import hashlib
import json

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shared import errors
from shared.pb.quire.v1 import compiler_pb2, control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from shared.rpc import auth, server
from shared.rpc.status import from_rpc_error
from tests.support.certificates import authority

NOW = 1_000_000.0


def entry(name, secret, scopes, expires_at=None):
    return auth.Token(name, hashlib.sha256(secret.encode()).hexdigest(), tuple(map(auth.Scope, scopes)), expires_at)


TOKENS = (
    entry("clients", "c", ["infer"]),
    entry("old", "o", ["control"], NOW),
    entry("young", "y", ["control"], NOW + 1),
    entry("root", "r", ["admin"]),
)


class Controls(control_pb2_grpc.ControlServicer):
    async def GetLoad(self, request, context):
        return control_pb2.GetLoadResponse(draining=True)

    async def Drain(self, request, context):
        return control_pb2.DrainResponse(finished=3)


class Inferences(inference_pb2_grpc.InferenceServicer):
    async def Generate(self, request, context):
        yield inference_pb2.GenerateResponse(accepted=inference_pb2.Accepted(prompt_tokens=7))


@pytest.fixture
async def channel():
    running = server.Server(server.ServerOptions("127.0.0.1:0"), [], [auth.AuthInterceptor(TOKENS, lambda: NOW)])
    control_pb2_grpc.add_ControlServicer_to_server(Controls(), running.grpc)
    inference_pb2_grpc.add_InferenceServicer_to_server(Inferences(), running.grpc)
    async with grpc.aio.insecure_channel(await running.start()) as opened:
        yield opened
    await running.stop(0)


async def outcome(call):
    try:
        response = await call
    except grpc.aio.AioRpcError as error:
        return type(from_rpc_error(error))
    return response


@pytest.mark.parametrize(
    ("header", "load", "drain"),
    [
        (None, errors.TokenInvalid, errors.TokenInvalid),
        ("Bearer nobody", errors.TokenInvalid, errors.TokenInvalid),
        ("Basic y", errors.TokenInvalid, errors.TokenInvalid),
        ("Bearer ", errors.TokenInvalid, errors.TokenInvalid),
        ("Bearer o", errors.TokenInvalid, errors.TokenInvalid),
        ("Bearer c", errors.ScopeMissing, errors.ScopeMissing),
        ("Bearer y", "ok", errors.ScopeMissing),
        ("bearer r", "ok", "ok"),
    ],
)
async def test_scopes(channel, header, load, drain):
    stub = control_pb2_grpc.ControlStub(channel)
    metadata = [("authorization", header)] if header else []
    got = await outcome(stub.GetLoad(control_pb2.GetLoadRequest(), metadata=metadata))
    assert got == load if load != "ok" else got.draining
    got = await outcome(stub.Drain(control_pb2.DrainRequest(), metadata=metadata))
    assert got == drain if drain != "ok" else got.finished == 3


async def test_streams_are_guarded_too(channel):
    stub = inference_pb2_grpc.InferenceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(inference_pb2.GenerateRequest()).read()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    call = stub.Generate(inference_pb2.GenerateRequest(), metadata=[("authorization", "Bearer c")])
    assert (await call.read()).accepted.prompt_tokens == 7


async def test_health_needs_no_token(channel):
    response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="liveness"))
    assert response.status == health_pb2.HealthCheckResponse.SERVING


def test_every_method_has_a_scope_of_its_service():
    for module in (compiler_pb2, control_pb2, inference_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            assert f"/{service.full_name}" in auth._BY_SERVICE
            for method in service.methods:
                assert auth.scope_of(f"/{service.full_name}/{method.name}") is not None
    for method in auth._BY_METHOD:
        service, _, name = method[1:].rpartition("/")
        descriptor = {**compiler_pb2.DESCRIPTOR.services_by_name, **control_pb2.DESCRIPTOR.services_by_name}[
            service.rpartition(".")[2]
        ]
        assert name in descriptor.methods_by_name, f"{method} is in the table but not in the protos"
    assert auth.scope_of("/quire.v1.Unheard/Of") is auth.Scope.ADMIN
    assert auth.scope_of("/grpc.health.v1.Health/Check") is None


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"tokens": [{"name": "a", "sha256": "12", "scopes": ["infer"]}]}', '{"tokens": [], "more": 1}']
    + [json.dumps({"tokens": [{"name": "a", "sha256": "0" * 64, "scopes": [scope]}]}) for scope in ("root", 1)]
    + [json.dumps({"tokens": [{"name": "a", "sha256": digest * 64, "scopes": ["infer"]}]}) for digest in ("x", "\u00e9")],
)
def test_bad_token_files_are_refused(tmp_path, content):
    path = tmp_path / "tokens.json"
    path.write_text(content)
    with pytest.raises(errors.FieldOutOfRange, match="token file"):
        auth.read_tokens(path)


def test_a_good_token_file_is_read(tmp_path):
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps({"tokens": [{"name": "a", "sha256": "0" * 64, "scopes": ["infer"], "expires_at": None}]}))
    assert auth.read_tokens(path) == (auth.Token("a", "0" * 64, (auth.Scope.INFER,)),)


async def test_mutual_tls(tmp_path):
    (certificate, key), (other, other_key) = authority("ours"), authority("theirs")
    for name, content in {"cert.pem": certificate, "key.pem": key}.items():
        (tmp_path / name).write_bytes(content)
    files = server.TlsFiles(tmp_path / "cert.pem", tmp_path / "key.pem", client_ca=tmp_path / "cert.pem")
    running = server.Server(server.ServerOptions("127.0.0.1:0", tls=files), [])
    control_pb2_grpc.add_ControlServicer_to_server(Controls(), running.grpc)
    port = (await running.start()).rpartition(":")[2]

    async def call(credentials):
        async with grpc.aio.secure_channel(f"localhost:{port}", credentials) as channel:
            return await outcome(control_pb2_grpc.ControlStub(channel).GetLoad(control_pb2.GetLoadRequest(), timeout=5))

    assert (await call(grpc.ssl_channel_credentials(certificate, key, certificate))).draining
    assert await call(grpc.ssl_channel_credentials(other, key, certificate)) is errors.Unavailable
    assert await call(grpc.ssl_channel_credentials(certificate)) is errors.Unavailable
    assert await call(grpc.ssl_channel_credentials(certificate, other_key, other)) is errors.Unavailable
    await running.stop(0)

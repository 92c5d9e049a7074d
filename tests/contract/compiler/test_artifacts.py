"""The artifact store over gRPC."""

import hashlib
import json

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.duration_pb2 import Duration

from shared.artifacts.key import ArtifactKey
from shared.artifacts.local import LocalStore
from shared.artifacts.signing import TrustedKeys, sign_manifest
from shared.errors import ArtifactUntrusted
from shared.pb.quire.v1 import common_pb2
from shared.pb.quire.v1 import compiler_pb2 as pb
from tests.contract.compiler.conftest import ENGINE_ID, MODEL_ID, refused

DEVICE = pb.DeviceDescription(kind="cpu", isa=["avx2", "sse"], toolchain={"torch": "2.14.1", "ops": "abc"})


async def test_an_engine_and_its_model_are_shown_whole(client):
    client.publish()
    engine = (await client.stub.GetArtifact(pb.GetArtifactRequest(artifact_id=ENGINE_ID))).artifact
    assert (engine.kind, engine.model_id, engine.backend) == ("engine", MODEL_ID, common_pb2.BACKEND_INDUCTOR)
    assert (engine.layout, engine.dtype) == (common_pb2.KV_LAYOUT_PAGED, common_pb2.ELEMENT_TYPE_FLOAT32)
    assert (engine.max_len, engine.page_size, [p.name for p in engine.profiles]) == (512, 16, ["decode", "prefill"])
    assert [file.path for file in engine.files] == ["engine.bin"]
    assert engine.published_at.ToSeconds() > 0
    assert json.loads(engine.manifest_json)["artifact_id"] == ENGINE_ID
    model = (await client.stub.GetArtifact(pb.GetArtifactRequest(artifact_id=MODEL_ID))).artifact
    assert (model.kind, model.model_id, model.backend) == ("model", MODEL_ID, common_pb2.BACKEND_UNSPECIFIED)


async def test_listing_pages_newest_first(client):
    ids = [f"{i:064x}" for i in range(1, 6)]
    for artifact_id in ids:
        client.publish(artifact_id)
    seen, token = [], ""
    while True:
        page = await client.stub.ListArtifacts(pb.ListArtifactsRequest(page_size=2, page_token=token, kind="engine"))
        seen += [artifact.artifact_id for artifact in page.artifacts]
        token = page.next_page_token
        if not token:
            break
    assert seen == ids[::-1]
    everything = await client.stub.ListArtifacts(pb.ListArtifactsRequest())
    assert {a.kind for a in everything.artifacts} == {"engine", "model"}


@pytest.mark.parametrize("fields", [{"kind": "secret"}, {"page_size": 501}, {"page_token": "x"}])
async def test_bad_listings(client, fields):
    (field,) = fields
    with refused("FIELD_OUT_OF_RANGE", field):
        await client.stub.ListArtifacts(pb.ListArtifactsRequest(**fields))


@pytest.mark.parametrize("verb", ["GetArtifact", "VerifyArtifact", "DeleteArtifact", "SignArtifact", "CheckCompatibility"])
async def test_ids_that_name_nothing(client, verb):
    def request(artifact_id):
        extra = {"CheckCompatibility": {"device": DEVICE}, "SignArtifact": {"signature": b"s"}}.get(verb, {})
        return getattr(pb, f"{verb}Request")(artifact_id=artifact_id, **extra)

    with refused("ARTIFACT_NOT_FOUND"):
        await getattr(client.stub, verb)(request("0" * 64))
    for bad in ("", "../../etc/passwd", "E" * 64, "e" * 63):
        with refused("FIELD_OUT_OF_RANGE", "artifact_id"):
            await getattr(client.stub, verb)(request(bad))


async def test_verify_counts_and_finds_one_changed_byte(client):
    client.publish()
    answer = await client.stub.VerifyArtifact(pb.VerifyArtifactRequest(artifact_id=ENGINE_ID))
    assert (answer.files_checked, answer.bytes_checked) == (1, 0)
    with client.store.open(ENGINE_ID) as handle:
        path = handle.path("engine.bin")
    path.chmod(0o644)
    path.write_bytes(b"!")
    with refused("ARTIFACT_CORRUPT"):
        await client.stub.VerifyArtifact(pb.VerifyArtifactRequest(artifact_id=ENGINE_ID))


async def test_a_damaged_manifest_can_be_listed_and_deleted(client):
    client.publish()
    with client.store.open(ENGINE_ID) as handle:
        manifest = handle.path("engine.bin").parent / "manifest.json"
    manifest.chmod(0o644)
    manifest.write_bytes(b"{}")
    listed = (await client.stub.ListArtifacts(pb.ListArtifactsRequest())).artifacts
    assert ("unreadable", ENGINE_ID) in [(a.kind, a.artifact_id) for a in listed]
    await client.stub.DeleteArtifact(pb.DeleteArtifactRequest(artifact_id=ENGINE_ID))
    assert not client.store.contains(ENGINE_ID)


@pytest.mark.parametrize("fields", [{"schema_version": 99}, {"backend": "another"}])
async def test_a_listing_goes_on_past_what_another_version_wrote_or_what_is_removed_meanwhile(client, monkeypatch, fields):
    gone, other = "1" * 64, "2" * 64
    client.publish()
    client.publish(gone)
    client.publish(other, fields=fields)
    genuine = LocalStore.manifest

    def manifest(store, artifact_id):
        return genuine(store, "3" * 64 if artifact_id == gone else artifact_id)

    monkeypatch.setattr(LocalStore, "manifest", manifest)
    listed = (await client.stub.ListArtifacts(pb.ListArtifactsRequest())).artifacts
    assert [(a.kind, a.artifact_id) for a in listed] == [("unreadable", other), ("engine", ENGINE_ID), ("model", MODEL_ID)]


async def test_a_listing_of_many_large_engines_fits_into_a_message(client):
    """An engine of 30 layers has a manifest of 47 KB."""
    for number in range(50):
        client.publish(f"{number:064x}", components={"graph": "x" * 100_000})
    listed = (await client.stub.ListArtifacts(pb.ListArtifactsRequest(kind="engine"))).artifacts
    assert len(listed) == 50
    assert not any(artifact.manifest_json or artifact.proof for artifact in listed)


async def test_what_still_serves_is_not_deleted(client):
    client.publish()
    with refused("IN_USE"):
        await client.stub.DeleteArtifact(pb.DeleteArtifactRequest(artifact_id=MODEL_ID))
    with client.store.open(ENGINE_ID), refused("IN_USE"):
        await client.stub.DeleteArtifact(pb.DeleteArtifactRequest(artifact_id=ENGINE_ID))
    for artifact_id in (ENGINE_ID, MODEL_ID):
        await client.stub.DeleteArtifact(pb.DeleteArtifactRequest(artifact_id=artifact_id))
    assert client.store.list() == ()


async def test_compatibility(client):
    client.publish()

    async def check(**changes):
        device = pb.DeviceDescription()
        device.CopyFrom(DEVICE)
        for name, value in changes.items():
            if name == "isa":
                del device.isa[:]
                device.isa.extend(value)
            elif name == "toolchain":
                device.toolchain.update(value)
            else:
                setattr(device, name, value)
        return await client.stub.CheckCompatibility(pb.CheckCompatibilityRequest(artifact_id=ENGINE_ID, device=device))

    assert (await check()).compatibility == pb.COMPATIBILITY_OPTIMAL
    assert (await check(isa=["avx2", "avx512f"])).compatibility == pb.COMPATIBILITY_PREFER_RECOMPILE
    other = await check(toolchain={"torch": "2.13.0"})
    assert (other.compatibility, other.field, other.expected, other.got) == (
        pb.COMPATIBILITY_UNSUPPORTED,
        "toolchain.torch",
        "2.14.1",
        "2.13.0",
    )
    assert (await check(isa=["sse"])).field == "target.isa"
    with refused("FIELD_OUT_OF_RANGE", "device.kind"):
        await check(kind="abacus")
    with refused("FIELD_OUT_OF_RANGE", "artifact_id"):
        await client.stub.CheckCompatibility(pb.CheckCompatibilityRequest(artifact_id=MODEL_ID, device=DEVICE))


async def test_capabilities_name_what_is_there_and_what_is_missing(client):
    found = await client.stub.GetBuildCapabilities(pb.GetBuildCapabilitiesRequest())
    by_backend = {entry.backend: entry for entry in found.backends}
    assert set(by_backend) == {common_pb2.BACKEND_INDUCTOR, common_pb2.BACKEND_TENSORRT_RTX, common_pb2.BACKEND_TENSORRT}
    inductor = by_backend[common_pb2.BACKEND_INDUCTOR]
    assert inductor.available
    assert inductor.toolchain["torch"].startswith("2.")
    assert "cpp" in inductor.toolchain
    assert all(entry.available != bool(entry.reason) for entry in found.backends)
    assert found.cpu_count >= 1
    assert found.memory_bytes > 1 << 28


async def test_a_collection_keeps_what_is_in_use_and_says_what_went(client):
    unused, model = "1" * 64, "2" * 64
    client.publish()
    client.publish(unused, model)
    with client.store.open(ENGINE_ID):  # a runtime serves it; its model stays because it does
        report = await client.stub.CollectGarbage(pb.CollectGarbageRequest(max_bytes=0))
        assert (set(report.removed), list(report.failed)) == ({unused, model}, [])
        assert report.freed_bytes > 0
        assert {info.artifact_id for info in client.store.list()} == {ENGINE_ID, MODEL_ID}
        aged = pb.CollectGarbageRequest(max_age=Duration(seconds=3600))
        assert not (await client.stub.CollectGarbage(aged)).removed
    assert not (await client.stub.CollectGarbage(pb.CollectGarbageRequest())).removed, "no limit, nothing to remove"
    assert list((await client.stub.CollectGarbage(pb.CollectGarbageRequest(max_bytes=0))).removed) == [ENGINE_ID, MODEL_ID]
    with refused("FIELD_OUT_OF_RANGE", "max_age"):
        await client.stub.CollectGarbage(pb.CollectGarbageRequest(max_age=Duration(seconds=-1)))


async def test_a_signature_travels_and_is_kept(client):
    key = Ed25519PrivateKey.generate()
    trusting = LocalStore(client.store_directory, verifier=TrustedKeys([key.public_key()]))
    client.publish()
    with pytest.raises(ArtifactUntrusted):
        trusting.open(ENGINE_ID)
    manifest = (await client.stub.GetArtifact(pb.GetArtifactRequest(artifact_id=ENGINE_ID))).artifact.manifest_json
    await client.stub.SignArtifact(pb.SignArtifactRequest(artifact_id=ENGINE_ID, signature=sign_manifest(key, manifest)))
    trusting.open(ENGINE_ID).close()
    for bad in (b"", b"x" * 2000):
        with refused("FIELD_OUT_OF_RANGE", "signature"):
            await client.stub.SignArtifact(pb.SignArtifactRequest(artifact_id=ENGINE_ID, signature=bad))


async def test_a_miss_is_explained_by_the_nearest_engines(client):
    """The parts of the key, and the engines that share most of them first."""

    def digests(**values):
        return {name: hashlib.sha256(value.encode()).hexdigest() for name, value in values.items()}

    wanted = digests(weights="w", profiles="p", toolchain="t")
    spec = client.spec(client.source(components=wanted))
    nothing = await client.stub.ExplainMiss(pb.ExplainMissRequest(spec=spec))
    assert (nothing.hit, list(nothing.nearest)) == (False, [])
    client.publish("3" * 64, components=digests(weights="w", profiles="q", toolchain="u"))
    client.publish("4" * 64, components=digests(weights="w", profiles="p", toolchain="u"))
    client.publish("5" * 64)
    answer = await client.stub.ExplainMiss(pb.ExplainMissRequest(spec=spec))
    assert (answer.artifact_id, answer.hit) == (ArtifactKey(wanted).artifact_id, False)
    assert [(near.artifact_id[0], list(near.components)) for near in answer.nearest] == [
        ("4", ["toolchain"]),
        ("3", ["profiles", "toolchain"]),
        ("5", ["profiles", "toolchain", "weights"]),
    ]
    client.publish(ArtifactKey(wanted).artifact_id, components=wanted)
    assert (await client.stub.ExplainMiss(pb.ExplainMissRequest(spec=spec))).hit
    assert not (await client.stub.ListCompileJobs(pb.ListCompileJobsRequest())).jobs
    with refused("SOURCE_INVALID"):
        await client.stub.ExplainMiss(pb.ExplainMissRequest(spec=client.spec(client.source("bad", end="failed"))))

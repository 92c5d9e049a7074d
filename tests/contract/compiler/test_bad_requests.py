"""Bad input gets a typed error that names the field, and nothing changes."""

import pickle

import pytest

from shared.pb.quire.v1 import common_pb2
from shared.pb.quire.v1 import compiler_pb2 as pb
from tests.contract.compiler.conftest import profile, refused, sizes

DECODE, PREFILL = profile("decode", sizes(1, 8), sizes(1, 1)), profile("prefill", sizes(1, 1), sizes(1, 128))


async def nothing_happened(client):
    jobs = await client.stub.ListCompileJobs(pb.ListCompileJobsRequest())
    assert not jobs.jobs
    assert client.store.list() == ()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"backend": 0}, "spec.backend"),
        ({"backend": 77}, "spec.backend"),
        ({"backend": common_pb2.BACKEND_TENSORRT}, "targets"),
        ({"backend": common_pb2.BACKEND_TENSORRT, "targets": ["cpu"]}, "targets"),
        ({"layout": 0}, "spec.layout"),
        ({"dtype": 0}, "spec.dtype"),
        ({"dtype": common_pb2.ELEMENT_TYPE_FLOAT16}, "dtype"),
        ({"max_len": 0}, "max_len"),
        ({"max_len": 2**32 - 1}, "max_len"),
        ({"page_size": 4096}, "page_size"),
        ({"layout": common_pb2.KV_LAYOUT_LINEAR}, "page_size"),
        ({"targets": ["cpu", "sm90"]}, "targets"),
        ({"allow_copying": True}, "allow_copying"),
        ({"constant_weights": True}, "constant_weights"),
        ({"source": ""}, "source"),
        ({"profiles": []}, "profiles"),
        ({"profiles": [DECODE]}, "profiles"),
        ({"profiles": [DECODE, PREFILL, PREFILL]}, "profiles"),
        ({"profiles": [DECODE, profile("prefill", sizes(1, 1), sizes(1, 513))]}, "profiles"),
        ({"profiles": [DECODE, profile("Prefill!", sizes(1, 1), sizes(1, 8))]}, "spec.profiles"),
        ({"profiles": [DECODE, profile("prefill", sizes(0, 8), sizes(1, 8))]}, "spec.profiles.prefill.batch"),
        ({"profiles": [DECODE, profile("prefill", sizes(1, 1), sizes(1, 0))]}, "spec.profiles.prefill.query_len"),
        ({"profiles": [DECODE, profile("prefill", sizes(1, 1), sizes(8, 16, 32))]}, "spec.profiles.prefill.query_len"),
    ],
)
async def test_a_bad_spec(client, changes, field):
    client.source()
    with refused("FIELD_OUT_OF_RANGE", field):
        await client.create(client.spec("m", **changes))
    with refused("FIELD_OUT_OF_RANGE", field):
        await client.stub.ExplainModel(pb.ExplainModelRequest(spec=client.spec("m", **changes)))
    await nothing_happened(client)


@pytest.mark.parametrize(("low", "high", "opt"), [(900, 1000, 950), (1, 8, 4), (64, 64, 64)])
async def test_an_optimum_that_is_not_given_is_the_middle(client, low, high, opt):
    """BR-023: min + max / 2 would be 1400."""
    client.source(end="hang")
    prefill = profile("prefill", sizes(1, 1), sizes(low, high))
    job = (await client.create(client.spec("m", max_len=2048, profiles=[DECODE, prefill]))).job
    assert job.spec.profiles[1].query_len == sizes(low, high, opt)


@pytest.mark.parametrize(
    "limits",
    [
        {"max_runtime_s": -1.0},
        {"max_runtime_s": float("nan")},
        {"max_runtime_s": 1e12},
        {"max_pending_s": float("inf")},
        {"max_attempts": 1000},
        {"max_host_bytes": 2**63},
    ],
)
async def test_bad_limits(client, limits):
    client.source()
    (name,) = limits
    with refused("FIELD_OUT_OF_RANGE", f"limits.{name}"):
        await client.create(client.spec("m"), **limits)
    await nothing_happened(client)


@pytest.mark.parametrize("request_id", ["a b", "../x", "x" * 129, "\x00", "é"])
async def test_a_bad_request_id(client, request_id):
    client.source()
    with refused("FIELD_OUT_OF_RANGE", "request_id"):
        await client.create(client.spec("m"), request_id)
    await nothing_happened(client)


@pytest.mark.parametrize("source", ["/etc", "../data", "m/../../data", "/", "~", "link", "{data}"])
async def test_paths_out_of_the_model_roots(client, tmp_path, source):
    client.source()
    (client.models / "link").symlink_to(tmp_path / "data")
    named = source.format(data=tmp_path / "data")
    with refused("MODEL_NOT_FOUND" if source == "~" else "FIELD_OUT_OF_RANGE", "source"):
        await client.create(client.spec(named))
    await nothing_happened(client)


async def test_an_unknown_model(client):
    with refused("MODEL_NOT_FOUND", "source"):
        await client.create(client.spec("nothing-here"))


async def test_a_pickled_checkpoint_is_refused_before_anything_runs(client):
    client.source()
    (client.models / "m" / "model.safetensors").rename(client.models / "m" / "pytorch_model.bin")
    (client.models / "m" / "pytorch_model.bin").write_bytes(pickle.dumps([1]))
    for call in (client.create(client.spec("m")), client.stub.ExplainModel(pb.ExplainModelRequest(spec=client.spec("m")))):
        with refused("SOURCE_UNSAFE"):
            await call
    await nothing_happened(client)


async def test_a_missing_shard_is_named_at_once(client):
    """BR-146."""
    client.source()
    (client.models / "m" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    with refused("SOURCE_INVALID") as error:
        await client.create(client.spec("m"))
    assert "model-1.safetensors" in error[0].message
    await nothing_happened(client)


async def test_a_program_without_its_tokenizer_is_refused(client):
    (client.models / "p.pt2").write_bytes(b"x")
    with refused("SOURCE_INVALID") as error:
        await client.create(client.spec("p.pt2"))
    assert "tokenizer.json beside it" in error[0].message
    await nothing_happened(client)


async def test_other_files_are_no_models(client):
    for name, reason in (("w.bin", "SOURCE_UNSAFE"), ("notes.txt", "MODEL_UNSUPPORTED")):
        (client.models / name).write_bytes(b"x")
        with refused(reason, "source"):
            await client.create(client.spec(name))
    await nothing_happened(client)

"""Hostile calls, as data: a method, the bytes and metadata sent to it, and the reasons of which one must come back."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from shared.pb.quire.v1 import common_pb2 as common
from shared.pb.quire.v1 import compiler_pb2 as compiler
from shared.pb.quire.v1 import control_pb2 as control
from shared.pb.quire.v1 import inference_pb2 as pb

GENERATE = "/quire.v1.Inference/Generate"
CONTROL, COMPILER = "/quire.v1.Control/", "/quire.v1.Compiler/"
CREATE = COMPILER + "CreateCompileJob"
MIB = 1 << 20
MOST = 2**32 - 1
ENGINE_ID = "b" * 64
BAD, NO_MODEL, TOO_LARGE = "FIELD_OUT_OF_RANGE", "MODEL_NOT_FOUND", "MESSAGE_TOO_LARGE"


@dataclass(frozen=True)
class Call:
    """`token` is the bearer token sent (None: none); `headers` are sent beside it."""

    name: str
    method: str
    payload: bytes
    reasons: tuple[str, ...]
    token: str | None = "admin"
    headers: tuple[tuple[str, str], ...] = field(default=())


def generate(**fields: object) -> bytes:
    given = {"engine": "tiny", "token_ids": pb.TokenIds(ids=[1]), "stopping": pb.Stopping(max_tokens=4)}
    return pb.GenerateRequest(**(given | fields)).SerializeToString()


def sampling(**fields: float) -> bytes:
    return generate(sampling=pb.Sampling(**fields))


def policy(**fields: object) -> bytes:
    options = {"name": "sink_recent", "budget": 8, "interval": 8} | fields
    return generate(kv=pb.KVOptions(policy=pb.CompactionOptions(**options)))


def profile(name: str, batch: int, query_len: int) -> common.OptimizationProfile:
    sizes = (common.SizeRange(min=1, max=most) for most in (batch, query_len))
    return common.OptimizationProfile(name=name, batch=next(sizes), query_len=next(sizes))


def spec(**fields: object) -> bytes:
    whole = {
        "source": "m",
        "backend": common.BACKEND_INDUCTOR,
        "layout": common.KV_LAYOUT_PAGED,
        "dtype": common.ELEMENT_TYPE_FLOAT32,
        "max_len": 512,
        "page_size": 16,
        "profiles": [profile("decode", 8, 1), profile("prefill", 1, 128)],
    }
    return job(spec=compiler.CompileSpec(**(whole | fields)))


def job(**fields: object) -> bytes:
    return compiler.CreateCompileJobRequest(**({"request_id": "r"} | fields)).SerializeToString()


def load(**fields: object) -> bytes:
    return control.LoadEngineRequest(**({"artifact_id": ENGINE_ID, "name": "other"} | fields)).SerializeToString()


def of(message: Message) -> bytes:
    return message.SerializeToString()


_SOURCE_BOMB = b"\x0a" + b"\xff\xff\xff\xff\x07"  # field 1, 2 GiB of it, none there

GARBAGE = [
    Call(f"{name} to {method.rpartition('/')[2]}", method, payload, (BAD,))
    for method in (GENERATE, CONTROL + "LoadEngine", CREATE, COMPILER + "WatchCompileJob")
    for name, payload in {
        "ones": b"\xff" * 1000,
        "a length of 2 GiB": _SOURCE_BOMB,
        "10,000 open groups": b"\x0b" * 10_000,
        "an endless varint": b"\x08" + b"\xff" * 64,
        "text that is no UTF-8": b"\x0a\x03\xed\xa0\x80",
    }.items()
]

SIZES = [
    Call("3 MiB of a field nobody knows", GENERATE, b"\xfa\x7f\x80\x80\xc0\x01" + bytes(3 * MIB), (NO_MODEL,)),
    Call("300,000 fields nobody knows", GENERATE, b"\xf8\x7f\x01" * 300_000, (NO_MODEL,)),
    Call("a message over the cap", GENERATE, generate(text="x" * (5 * MIB)), (TOO_LARGE,)),
    Call("a job over the cap", CREATE, spec(source="x" * (5 * MIB)), (TOO_LARGE,)),
    Call("2 MiB of text", GENERATE, generate(token_ids=None, text="w1 " * (2 * MIB // 3)), (BAD,)),
    Call("a million ids", GENERATE, generate(token_ids=pb.TokenIds(ids=[1] * 1_000_000)), (BAD,)),
    Call("a million stop strings", GENERATE, generate(stopping=pb.Stopping(max_tokens=4, stop=["x"] * 1_000_000)), (BAD,)),
    Call("a million stop ids", GENERATE, generate(stopping=pb.Stopping(max_tokens=4, stop_token_ids=[7] * 1_000_000)), (BAD,)),
    Call("one long stop string", GENERATE, generate(stopping=pb.Stopping(max_tokens=4, stop=["x" * (3 * MIB)])), (BAD,)),
    Call("a long request id", GENERATE, generate(request_id="x" * (3 * MIB)), (BAD,)),
    Call("a long engine name", GENERATE, generate(engine="x" * (3 * MIB)), (NO_MODEL,)),
    Call("a long salt", GENERATE, generate(kv=pb.KVOptions(cache_salt="é" * MIB)), (BAD,)),
    Call("a long policy", GENERATE, policy(name="x" * (3 * MIB)), (BAD,)),
    Call("a long artifact id", CONTROL + "LoadEngine", load(artifact_id="b" * (3 * MIB)), (BAD,)),
    Call(
        "100,000 profiles",
        CREATE,
        spec(profiles=[profile("p", 1, 1)] * 100_000),
        (BAD,),
    ),
    Call("100,000 targets", CREATE, spec(targets=["cpu"] * 100_000), (BAD,)),
    Call(
        "a device with 100,000 instruction sets",
        COMPILER + "CheckCompatibility",
        of(
            compiler.CheckCompatibilityRequest(
                artifact_id="c" * 64, device=compiler.DeviceDescription(kind="cpu", isa=["avx2"] * 100_000)
            )
        ),
        ("ARTIFACT_NOT_FOUND", BAD),
    ),
]

NUMBERS = [
    *(
        Call(f"{name} {value}", GENERATE, sampling(**{name: value}), (BAD,))
        for name, value in (
            ("temperature", math.inf),
            ("temperature", -math.inf),
            ("temperature", math.nan),
            ("temperature", 3.4e38),
            ("top_p", math.nan),
            ("top_p", -0.0),
            ("min_p", math.inf),
            ("repetition_penalty", math.inf),
            ("repetition_penalty", -0.0),
            ("presence_penalty", -3.4e38),
            ("frequency_penalty", math.nan),
            ("n", MOST),
            ("logprobs", MOST),
            ("top_k", MOST),
        )
    ),
    Call("as many tokens as fit a field", GENERATE, generate(stopping=pb.Stopping(max_tokens=MOST)), (BAD,)),
    Call("more tokens at least than at most", GENERATE, generate(stopping=pb.Stopping(max_tokens=4, min_tokens=MOST)), (BAD,)),
    Call("the last token id", GENERATE, generate(token_ids=pb.TokenIds(ids=[MOST])), (BAD,)),
    Call("the least priority", GENERATE, generate(priority=-(2**31)), (BAD,)),
    Call("a timeout before time", GENERATE, generate(run_timeout=Duration(seconds=-(2**63))), (BAD,)),
    Call("a wait of minus a second", GENERATE, generate(queue_timeout=Duration(nanos=-(10**9))), (BAD,)),
    Call("a budget beyond memory", GENERATE, policy(budget=MOST), (BAD,)),
    Call("an interval of nothing", GENERATE, policy(interval=0), (BAD,)),
    Call("more sinks than budget", GENERATE, policy(sinks=MOST), (BAD,)),
    Call("a pool of 2^32 pages", CONTROL + "LoadEngine", load(num_pages=MOST), ("MEMORY_EXHAUSTED",)),
    Call("a pool of no page", CONTROL + "LoadEngine", load(num_pages=0), (BAD,)),
    Call("a pool of 2^64 bytes", CONTROL + "LoadEngine", load(kv_bytes=2**64 - 1), ("MEMORY_EXHAUSTED",)),
    Call("a drain for ever", CONTROL + "Drain", of(control.DrainRequest(deadline=Duration(seconds=2**63 - 1))), (BAD,)),
    Call(
        "a grace before time",
        CONTROL + "UnloadEngine",
        of(control.UnloadEngineRequest(name="tiny", grace=Duration(seconds=-1))),
        (BAD,),
    ),
    Call("a page of 2^32 jobs", COMPILER + "ListCompileJobs", of(compiler.ListCompileJobsRequest(page_size=MOST)), (BAD,)),
    Call("a page of 2^32 artifacts", COMPILER + "ListArtifacts", of(compiler.ListArtifactsRequest(page_size=MOST)), (BAD,)),
    Call("a state that is none", COMPILER + "ListCompileJobs", of(compiler.ListCompileJobsRequest(states=[2**31 - 1])), (BAD,)),
    Call("limits beyond time", CREATE, job(limits=compiler.JobLimits(max_runtime_s=math.inf)), (BAD,)),
    Call(
        "limits that are no number",
        CREATE,
        job(limits=compiler.JobLimits(max_pending_s=math.nan)),
        (BAD,),
    ),
    Call("the longest cache", CREATE, spec(max_len=MOST), (BAD,)),
    Call("the largest page", CREATE, spec(page_size=MOST), (BAD,)),
]

NAMES = [
    Call("a sound job but for its source", CREATE, spec(), (NO_MODEL,)),
    *(
        Call(f"the source {shown}", CREATE, spec(source=source), reasons)
        for shown, source, reasons in (
            ("/etc/passwd", "/etc/passwd", (BAD,)),
            ("above the root", "../" * 40 + "etc/passwd", (BAD,)),
            ("of another process", "/proc/self/mem", (BAD,)),
            ("that never ends", "/dev/zero", (BAD,)),
            ("with a NUL", "m\0/../../etc", (BAD,)),
            ("longer than a path", "m/" * 5000, (BAD, NO_MODEL)),
            ("longer than a name", "m" * 300, (BAD, NO_MODEL)),
            ("of a URL", "https://example.com/model", (NO_MODEL,)),
            ("of a user's home", "~root/.ssh", (NO_MODEL,)),
            ("of a shell", "$(reboot)", (NO_MODEL,)),
            ("that is a pipe", "pipe.gguf", ("SOURCE_INVALID",)),
            ("that is a loop of links", "loop", (BAD, NO_MODEL)),
            ("that is a link out", "out", (BAD,)),
            ("with a pipe for a config", "piped", ("SOURCE_INVALID",)),
            ("with an index that is a bomb", "indexed", ("SOURCE_INVALID",)),
            ("with an index that climbs out", "climbing", ("SOURCE_INVALID",)),
        )
    ),
    Call(
        "an artifact above the store",
        COMPILER + "GetArtifact",
        of(compiler.GetArtifactRequest(artifact_id="../../etc/passwd")),
        (BAD,),
    ),
    Call(
        "an artifact to delete by a path",
        COMPILER + "DeleteArtifact",
        of(compiler.DeleteArtifactRequest(artifact_id="/" * 64)),
        (BAD,),
    ),
    Call(
        "an artifact to verify by a glob",
        COMPILER + "VerifyArtifact",
        of(compiler.VerifyArtifactRequest(artifact_id="*" * 64)),
        (BAD,),
    ),
    Call("a job by a path", COMPILER + "GetCompileJob", of(compiler.GetCompileJobRequest(job_id="../jobs.sqlite")), (BAD,)),
    Call("a job by SQL", COMPILER + "CancelCompileJob", of(compiler.CancelCompileJobRequest(job_id="x' OR '1'='1")), (BAD,)),
    Call(
        "a page token by SQL",
        COMPILER + "ListCompileJobs",
        of(compiler.ListCompileJobsRequest(page_token="0; DROP TABLE jobs")),
        (BAD,),
    ),
    Call("an engine by a path", CONTROL + "LoadEngine", load(artifact_id="../" * 21 + "x"), (BAD,)),
    Call("a name with a line break", CONTROL + "LoadEngine", load(name="a\nb"), (BAD,)),
    Call("an abort by a path", CONTROL + "Abort", of(control.AbortRequest(request_id="../../x")), (BAD,)),
]

ADMIN_SHA256 = hashlib.sha256(b"admin").hexdigest()
_ASK = of(control.GetLoadRequest())
_NO, _SCOPE = ("TOKEN_INVALID",), ("SCOPE",)
TOKENS = [
    Call("no token", CONTROL + "GetLoad", _ASK, _NO, token=None),
    Call("an unknown token", CONTROL + "GetLoad", _ASK, _NO, token="nobody"),
    Call("a token of 4,000 letters", CONTROL + "GetLoad", _ASK, _NO, token="a" * 4000),
    Call("an empty token", CONTROL + "GetLoad", _ASK, _NO, token=""),
    Call(
        "a digest for a token",
        CONTROL + "GetLoad",
        _ASK,
        _NO,
        token=ADMIN_SHA256,
    ),
    Call("two tokens in one", CONTROL + "GetLoad", _ASK, _NO, token="admin admin"),
    Call("another scheme", CONTROL + "GetLoad", _ASK, _NO, token=None, headers=(("authorization", "Basic YWRtaW46YWRtaW4="),)),
    Call("a token that has expired", CONTROL + "GetLoad", _ASK, _NO, token="expired"),
    Call("a token for streams", CONTROL + "GetLoad", _ASK, _SCOPE, token="infer"),
    Call("a token for streams, to compile", CREATE, spec(), _SCOPE, token="infer"),
    Call("a token for control, to drain", CONTROL + "Drain", of(control.DrainRequest()), _SCOPE, token="control"),
    Call(
        "a token to compile, to delete",
        COMPILER + "DeleteArtifact",
        of(compiler.DeleteArtifactRequest(artifact_id="a" * 64)),
        _SCOPE,
        token="compile",
    ),
    Call("garbage without a token", GENERATE, b"\xff" * 100, (BAD, "TOKEN_INVALID"), token=None),
    Call("a megabyte of metadata", CONTROL + "GetLoad", _ASK, (TOO_LARGE,), headers=(("x-junk", "j" * MIB),)),
    Call("1,000 headers", CONTROL + "GetLoad", _ASK, (TOO_LARGE,), headers=tuple((f"x-{n}", "junk") for n in range(1000))),
    Call("a token of 100,000 letters", CONTROL + "GetLoad", _ASK, (TOO_LARGE,), token="a" * 100_000),
]

CALLS = (*GARBAGE, *SIZES, *NUMBERS, *NAMES, *TOKENS)

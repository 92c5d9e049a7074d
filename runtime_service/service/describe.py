"""What Control tells of engines, their load and this host, as messages."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path

import torch

from runtime_service.compaction.registry import POLICIES
from runtime_service.config import RuntimeSettings
from runtime_service.service.convert import compaction_message
from runtime_service.service.engines import LoadedEngine
from runtime_service.session.load import EngineLoad
from shared.gpu import compute_capability
from shared.inductor.isa import host_features
from shared.inductor.toolchain import runtime_toolchain
from shared.pb.quire.v1 import compiler_pb2, control_pb2
from shared.rpc.messages import BACKENDS, DTYPES, LAYOUTS, profile_message

_CPUINFO = Path("/proc/cpuinfo")


def engine_message(engine: LoadedEngine) -> control_pb2.Engine:
    manifest, cache = engine.manifest, engine.manifest.cache
    message = control_pb2.Engine(
        name=engine.name,
        artifact_id=manifest.artifact_id,
        model_name=manifest.model.name,
        backend=BACKENDS[manifest.backend],
        layout=LAYOUTS[cache.layout],
        dtype=DTYPES[cache.groups[0].dtype],
        max_len=cache.max_len,
        page_size=cache.page_size,
        num_pages=engine.num_pages,
        kv_bytes=engine.kv_bytes,
        profiles=[profile_message(profile) for profile in manifest.profiles.profiles],
        caches_aliased=sum(write.aliased for write in manifest.proof),
        caches_total=len(manifest.proof),
        load_s=engine.load_s,
        prefix_caching=engine.prefix_caching,
    )
    if engine.compaction is not None:
        message.default_compaction.CopyFrom(compaction_message(engine.compaction))
    return message


def load_message(load: EngineLoad) -> control_pb2.EngineLoad:
    return control_pb2.EngineLoad(
        name=load.name,
        requests_waiting=load.requests_waiting,
        requests_running=load.requests_running,
        pages_total=load.pages_total,
        pages_free=load.pages_free,
        steps=load.steps,
        generated_tokens=load.generated_tokens,
        prompt_tokens=load.prompt_tokens,
        preemptions=load.preemptions,
        pages_cached=load.pages_cached,
        prefix_queries=load.prefix_queries,
        prefix_hits=load.prefix_hits,
    )


def compaction_stats(load: EngineLoad) -> control_pb2.CompactionStats:
    evidence = load.compaction
    return control_pb2.CompactionStats(
        engine=load.name,
        rounds=evidence.rounds,
        tokens_evicted=evidence.tokens_evicted,
        rows_moved=evidence.rows_moved,
        bytes_moved=evidence.bytes_moved,
        pages_freed=evidence.pages_freed,
        duration_s=evidence.duration_s,
    )


def server_info(settings: RuntimeSettings) -> control_pb2.GetServerInfoResponse:
    return control_pb2.GetServerInfoResponse(
        version=version("quire"),
        device=device_description(),
        max_waiting_requests=settings.max_waiting_requests,
        max_prompt_bytes=settings.max_prompt_bytes,
        max_prompt_tokens=settings.max_prompt_tokens,
        max_generated_tokens=settings.max_generated_tokens,
        compaction_policies=sorted(POLICIES),
    )


def device_description() -> compiler_pb2.DeviceDescription:
    """The device engines run on here, as the compiler service's CheckCompatibility wants it: the GPU where there is one."""
    if capability := compute_capability():
        name = torch.cuda.get_device_name()
        return compiler_pb2.DeviceDescription(kind="cuda", name=name, compute_capability=capability, toolchain=runtime_toolchain())
    return compiler_pb2.DeviceDescription(kind="cpu", name=_cpu_name(), isa=sorted(host_features()), toolchain=runtime_toolchain())


def _cpu_name() -> str:
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()

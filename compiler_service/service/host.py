"""What this host can build. Looks for libraries and tools without loading any of them: the service itself stays small."""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version

from shared.inductor.isa import host_features
from shared.pb.quire.v1 import common_pb2, compiler_pb2

_PACKAGES = ("torch", "transformers", "gguf", "safetensors", "tokenizers")
_SHOWN_FEATURES = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "sve",
    "bf16",
)


def build_capabilities() -> compiler_pb2.GetBuildCapabilitiesResponse:
    """Blocks for a moment on the C++ compiler."""
    features = host_features()
    return compiler_pb2.GetBuildCapabilitiesResponse(
        backends=[
            _inductor(),
            _absent(common_pb2.BACKEND_TENSORRT_RTX),
            _absent(common_pb2.BACKEND_TENSORRT),
        ],
        isa=[feature for feature in _SHOWN_FEATURES if feature in features],
        cpu_count=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    )


def _inductor() -> compiler_pb2.BackendCapability:
    toolchain, missing = {}, []
    for package in _PACKAGES:
        try:
            toolchain[package] = version(package)
        except PackageNotFoundError:
            missing.append(package)
    if missing:
        reason = f"{', '.join(missing)} not installed; pip install 'quire[compiler]'"
        return compiler_pb2.BackendCapability(backend=common_pb2.BACKEND_INDUCTOR, available=False, reason=reason)
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        reason = "no C++ compiler; install g++ or name one in CXX"
        return compiler_pb2.BackendCapability(backend=common_pb2.BACKEND_INDUCTOR, available=False, reason=reason)
    shown = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False, timeout=30)  # noqa: S603 - the build's own compiler
    toolchain["cpp"] = (shown.stdout.splitlines() or ["unknown"])[0]
    return compiler_pb2.BackendCapability(backend=common_pb2.BACKEND_INDUCTOR, available=True, toolchain=toolchain)


def _absent(backend: common_pb2.Backend.ValueType) -> compiler_pb2.BackendCapability:
    return compiler_pb2.BackendCapability(
        backend=backend, available=False, reason="this version of Quire builds inductor engines; TensorRT engines come later"
    )

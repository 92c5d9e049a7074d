"""What this host can build. Looks for libraries and tools without loading any of them: the service itself stays small."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from shared.inductor.isa import host_features
from shared.pb.quire.v1 import common_pb2, compiler_pb2

_PACKAGES = ("torch", "transformers", "gguf", "safetensors", "tokenizers")
_NVIDIA_DRIVER = Path("/proc/driver/nvidia")
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
            _tensorrt(common_pb2.BACKEND_TENSORRT_RTX, "tensorrt-rtx", "torch-tensorrt-rtx"),
            _tensorrt(common_pb2.BACKEND_TENSORRT, "tensorrt", "torch-tensorrt", needs_gpu=True),
        ],
        isa=[feature for feature in _SHOWN_FEATURES if feature in features],
        cpu_count=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    )


def _inductor() -> compiler_pb2.BackendCapability:
    toolchain, missing = _versions(_PACKAGES)
    if missing:
        return _unavailable(common_pb2.BACKEND_INDUCTOR, f"{', '.join(missing)} not installed; pip install 'quire[compiler]'")
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        return _unavailable(common_pb2.BACKEND_INDUCTOR, "no C++ compiler; install g++ or name one in CXX")
    shown = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False, timeout=30)  # noqa: S603 - the build's own compiler
    toolchain["cpp"] = (shown.stdout.splitlines() or ["unknown"])[0]
    return compiler_pb2.BackendCapability(backend=common_pb2.BACKEND_INDUCTOR, available=True, toolchain=toolchain)


def _tensorrt(backend: common_pb2.Backend.ValueType, *packages: str, needs_gpu: bool = False) -> compiler_pb2.BackendCapability:
    """The datacentre flavour times its kernels on the GPU it builds for; the RTX flavour builds anywhere."""
    toolchain, missing = _versions(packages)
    if missing:
        remedy = f"pip install 'quire[{packages[0]}]' in an environment without the other TensorRT"
        return _unavailable(backend, f"{', '.join(missing)} not installed; {remedy}")
    if needs_gpu and not _NVIDIA_DRIVER.exists():
        return _unavailable(backend, "no NVIDIA GPU on this host; build for tensorrt_rtx, which needs none")
    return compiler_pb2.BackendCapability(backend=backend, available=True, toolchain=toolchain)


def _versions(packages: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """(versions of what is installed, names of what is not)."""
    found, missing = {}, []
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            missing.append(package)
    return found, missing


def _unavailable(backend: common_pb2.Backend.ValueType, reason: str) -> compiler_pb2.BackendCapability:
    return compiler_pb2.BackendCapability(backend=backend, available=False, reason=reason)

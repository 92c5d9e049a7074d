"""What an engine is compiled for: this host's CPU, as a standard class, so that an engine runs on every host of it and not only
on its builder; or this host's GPU, because Inductor does not compile for one it cannot ask."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import dataclass
from typing import Protocol

import transformers
from torch._inductor import config
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.cpu_vec_isa import InvalidVecISA, VecAVX512, VecISA, pick_vec_isa

from shared.errors import BackendUnavailable
from shared.gpu import compute_capability
from shared.inductor.isa import X86_64_V3, X86_64_V4, features_of_flags, host_features
from shared.inductor.toolchain import runtime_toolchain
from shared.manifest import Target


class BuildTarget(Protocol):
    @property
    def manifest_target(self) -> Target: ...

    @property
    def options(self) -> dict[str, object]:
        """Inductor's options for this target."""
        ...

    @property
    def summary(self) -> str: ...


@dataclass(frozen=True, slots=True)
class CpuTarget:
    """`march` is the compiler's `-march`; None leaves the choice to Inductor, which then means this very kind of host."""

    march: str | None
    features: tuple[str, ...]

    @property
    def manifest_target(self) -> Target:
        return Target(device="cpu", isa=self.features, compute_capabilities=())

    @property
    def options(self) -> dict[str, object]:
        return {} if self.march is None else {"cpp.march": self.march}

    @property
    def summary(self) -> str:
        return " ".join(self.features)


@dataclass(frozen=True, slots=True)
class CudaTarget:
    """The GPU of this host, by its compute capability (`sm90`)."""

    capability: str

    @property
    def manifest_target(self) -> Target:
        return Target(device="cuda", isa=(), compute_capabilities=(self.capability,))

    @property
    def options(self) -> dict[str, object]:
        return {}

    @property
    def summary(self) -> str:
        return self.capability


def choose_target(name: str) -> BuildTarget:
    """`cpu`, or the compute capability of this host's GPU; BackendUnavailable for any other."""
    if name == "cpu":
        return host_target()
    here = compute_capability() or "no GPU torch can use"
    if name != here:
        raise BackendUnavailable(
            f"inductor builds for a GPU on a host that has it: {name} was asked for, here is {here}; send the job to such a host"
        )
    return CudaTarget(name)


def host_target() -> CpuTarget:
    """The widest vectors this host has, on the smallest standard instruction set that has them.

    BackendUnavailable where Inductor finds no vector instructions (or no C++ compiler to try them with).
    """
    isa = pick_vec_isa()
    if isinstance(isa, InvalidVecISA):
        raise BackendUnavailable(
            "the inductor backend needs a C++ compiler (g++) and a CPU with vector instructions; found none usable"
        )
    if platform.machine() != "x86_64" or not hasattr(config.cpp, "march"):  # torch 2.11 takes no -march but the host's own
        return CpuTarget(march=None, features=tuple(sorted(host_features())))
    return x86_target(isa)


def build_toolchain() -> dict[str, str]:
    """Every version that decides what a build of this backend makes; what must also hold where it runs, and what need not."""
    compiler = subprocess.run([get_cpp_compiler(), "--version"], capture_output=True, text=True, check=True, timeout=60)  # noqa: S603 - Inductor's own choice
    return {**runtime_toolchain(), "transformers": transformers.__version__, "cpp": compiler.stdout.splitlines()[0]}


def x86_target(isa: VecISA) -> CpuTarget:
    """The standard level that holds `isa`, and every feature code for it may use."""
    march, base = ("x86-64-v4", X86_64_V4) if isinstance(isa, VecAVX512) else ("x86-64-v3", X86_64_V3)
    return CpuTarget(march=march, features=tuple(sorted({*base, *features_of_flags(isa.build_arch_flags().split())})))

"""Inductor as a Backend: pools in place, verified by running the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from compiler_service.backends.backend import BuiltEngine, Progress
from compiler_service.backends.inductor.build import BACKEND, build_engine
from compiler_service.backends.inductor.probe import verify_engine
from compiler_service.backends.inductor.target import BuildTarget, build_toolchain, choose_target
from compiler_service.export.program import DecoderProgram
from compiler_service.lowering.lower import has_own_attention, lower_to_linear, lower_to_pools
from compiler_service.lowering.passes.attend_by_start import attend_by_start
from compiler_service.proof.certificate import ProofReport
from compiler_service.proof.decoder import read_proven_layers
from shared.bindings import AliasedBinding, pool_name
from shared.manifest import Target


@dataclass(frozen=True, slots=True)
class InductorBackend:
    """Builds for a device of this host: its CPU or its GPU."""

    host: BuildTarget
    toolchain: dict[str, str]
    name: str = field(default=BACKEND, init=False)
    static_cache: bool = field(default=False, init=False)

    @staticmethod
    def for_target(target: str) -> InductorBackend:
        """`target` is `cpu` or a compute capability; BackendUnavailable where this host has no such device."""
        return InductorBackend(choose_target(target), build_toolchain())

    @property
    def program_device(self) -> str:
        return self.host.manifest_target.device

    @property
    def target(self) -> Target:
        return self.host.manifest_target

    @property
    def options(self) -> dict[str, bool]:
        return {}

    def lower(self, exported: DecoderProgram) -> DecoderProgram:
        return lower_to_linear(exported)

    def place_caches(self, linear: DecoderProgram, report: ProofReport) -> DecoderProgram:
        if not has_own_attention(linear):
            linear = attend_by_start(linear, read_proven_layers(linear, report))
        return lower_to_pools(linear, report.proven_nodes)

    def alias_of(self, cache: str) -> AliasedBinding:
        pool = pool_name(int(cache.rpartition(".")[2]))
        return AliasedBinding(pool, pool)

    def build(
        self, program: DecoderProgram, report: ProofReport, weights: Path, directory: Path, progress: Progress
    ) -> BuiltEngine:
        progress(0.0, f"inductor, {len(program.cache.groups)} cache groups, {self.host.summary}")
        return build_engine(program, self.host, directory)

    def verify(self, built: BuiltEngine, exported: DecoderProgram, weights: Path) -> None:
        verify_engine(built, exported, weights)

"""TensorRT as a Backend: caches aliased by the engine itself, linear or in a paged pool, verified by the build's own record."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import load_file

from compiler_service.backends.backend import BuiltEngine, Progress
from compiler_service.backends.tensorrt.build import build_engine
from compiler_service.backends.tensorrt.decompose import decompose
from compiler_service.backends.tensorrt.flavour import Flavour, build_toolchain, require_buildable
from compiler_service.export.program import DecoderProgram
from compiler_service.lowering.lower import lower_to_linear
from compiler_service.lowering.passes.page_caches import page_caches
from compiler_service.proof.certificate import ProofReport
from shared.bindings import AliasedBinding, layer_of, pool_name, updated_name
from shared.kv_spec import Layout
from shared.manifest import Target


@dataclass(frozen=True, slots=True)
class TensorRTBackend:
    """Builds for `target`'s compute capabilities with the library of `flavour`. `allow_copying` takes a write without a proof on a
    copy of its cache; `constant_weights` puts the weights into the plan, instead of making them inputs of it."""

    flavour: Flavour
    target: Target
    toolchain: dict[str, str]
    layout: Layout = Layout.LINEAR
    allow_copying: bool = False
    constant_weights: bool = False
    static_cache: bool = field(default=True, init=False)
    program_device: str = field(default="cpu", init=False)

    @staticmethod
    def for_targets(
        flavour: Flavour,
        capabilities: tuple[str, ...],
        layout: Layout = Layout.LINEAR,
        *,
        allow_copying: bool = False,
        constant_weights: bool = False,
    ) -> TensorRTBackend:
        """BackendUnavailable where this host cannot build; FieldOutOfRange for a target the flavour does not know."""
        require_buildable(flavour, capabilities)
        target = Target(device="cuda", isa=(), compute_capabilities=capabilities)
        return TensorRTBackend(flavour, target, build_toolchain(flavour), layout, allow_copying, constant_weights)

    @property
    def name(self) -> str:
        return self.flavour.value

    @property
    def options(self) -> dict[str, bool]:
        return {"constant_weights": self.constant_weights}

    def lower(self, exported: DecoderProgram) -> DecoderProgram:
        return decompose(lower_to_linear(exported))

    def place_caches(self, linear: DecoderProgram, report: ProofReport) -> DecoderProgram:
        """The linear program as it is, or over a paged pool, which holds K and V of a layer."""
        return linear if linear.cache.layout is Layout.LINEAR else page_caches(linear, report.proven_nodes)

    def alias_of(self, cache: str) -> AliasedBinding:
        held = cache if self.layout is Layout.LINEAR else pool_name(layer_of(cache))
        return AliasedBinding(held, updated_name(held))

    def build(
        self, program: DecoderProgram, report: ProofReport, weights: Path, directory: Path, progress: Progress
    ) -> BuiltEngine:
        constants = load_file(weights) if self.constant_weights else None
        return build_engine(
            program, report, self.target, self.toolchain, directory, progress, constants, allow_copying=self.allow_copying
        )

    def verify(self, built: BuiltEngine, exported: DecoderProgram, weights: Path) -> None:
        """Nothing runs here: a plan runs on GPUs alone, and may be built where there is none. What the build recorded of its
        aliases stands in the manifest, and the runtime compares the plan with it on every load."""

"""What the pipeline asks of a backend: the form of the program it takes, the engine it makes, and how that is verified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from compiler_service.export.program import DecoderProgram
from compiler_service.proof.certificate import ProofReport
from shared.bindings import AliasedBinding, BindingSpec
from shared.manifest import Target

Progress = Callable[[float, str], None]
"""(fraction of the step done 0..1, what is being done)."""


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """What a build adds to an engine's manifest. Its files lie in `directory`.

    `constants` maps a constant of the engine to the weights-file tensor it is bound to; constants the engine's files hold
    (rotary frequencies) are not among them.
    """

    directory: Path
    target: Target
    toolchain: dict[str, str]
    bindings: tuple[BindingSpec, ...]
    aliases: tuple[AliasedBinding, ...]
    constants: dict[str, str]


class Backend(Protocol):
    """One backend, set up for one build. `static_cache`: it needs the caches' length in the program; `program_device`: where the
    program it takes lies, `cpu` or `cuda`."""

    @property
    def name(self) -> str: ...

    @property
    def static_cache(self) -> bool: ...

    @property
    def program_device(self) -> str: ...

    @property
    def target(self) -> Target: ...

    @property
    def toolchain(self) -> dict[str, str]:
        """Every version that decides what a build makes of a program."""
        ...

    @property
    def options(self) -> dict[str, bool]:
        """The choices of the spec that decide what a build makes of a program."""
        ...

    def lower(self, exported: DecoderProgram) -> DecoderProgram:
        """The linear program in the form whose cache writes are to be proven."""
        ...

    def place_caches(self, linear: DecoderProgram, report: ProofReport) -> DecoderProgram:
        """The proven program over the caches as the engine holds them."""
        ...

    def alias_of(self, cache: str) -> AliasedBinding:
        """The alias an engine has if `cache` is written in place."""
        ...

    def build(
        self, program: DecoderProgram, report: ProofReport, weights: Path, directory: Path, progress: Progress
    ) -> BuiltEngine:
        """Build into the empty `directory`. `weights` is the model's safetensors file, for engines that hold its tensors."""
        ...

    def verify(self, built: BuiltEngine, exported: DecoderProgram, weights: Path) -> None:
        """BuildFailed unless the engine does what `exported` does, as far as this host can tell."""
        ...

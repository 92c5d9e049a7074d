"""An AOTInductor engine behind the Engine protocol."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Protocol

import torch

from runtime_service.engine.bindings import StepCheck
from runtime_service.engine.engine import EngineInputs
from runtime_service.engine.weights import ModelWeights
from runtime_service.kv.pool import KVPool
from shared.bindings import Role
from shared.errors import InternalError
from shared.inductor.package import BoundPackage
from shared.manifest import EngineManifest


class Steps(Protocol):
    """How checked inputs become logits on one kind of device."""

    def run(self, inputs: EngineInputs, pool: KVPool) -> torch.Tensor: ...

    def close(self) -> None:
        """Wait for what was launched."""
        ...


class HostSteps:
    """On the CPU: the package is called with the inputs as they are."""

    def __init__(self, package: BoundPackage, manifest: EngineManifest) -> None:
        self._package = package
        self._inputs = input_names(manifest)

    def run(self, inputs: EngineInputs, pool: KVPool) -> torch.Tensor:
        return self._package.run([*(getattr(inputs, name) for name in self._inputs), *pool.tensors])

    def close(self) -> None: ...


def input_names(manifest: EngineManifest) -> tuple[str, ...]:
    """The engine's inputs but the pools, in call order: fields of EngineInputs."""
    return tuple(binding.name for binding in manifest.bindings if binding.role is Role.INPUT)


class InductorEngine:
    """Engine over a bound package. Holds `weights` so that the next engine of the model finds them mapped.

    `resources` are released by `close()`: the leases of the artifacts whose files are mapped.
    """

    def __init__(self, manifest: EngineManifest, steps: Steps, weights: ModelWeights, resources: ExitStack) -> None:
        self.manifest = manifest
        self.runs_ahead = manifest.target.device == "cuda"
        self._steps: Steps | None = steps
        self._weights: ModelWeights | None = weights
        self._resources = resources
        self._check = StepCheck(manifest)

    def run(self, inputs: EngineInputs, pool: KVPool) -> torch.Tensor:
        """See Engine.run. A pool is checked when it is first used, inputs on every call."""
        if self._steps is None:
            raise InternalError(f"engine {self.manifest.artifact_id} is closed")
        self._check(inputs, pool)
        return self._steps.run(inputs, pool)

    def close(self) -> None:
        """Let go of the code, the weights and the artifacts. Idempotent."""
        if self._steps is not None:
            self._steps.close()
        self._steps = self._weights = None
        self._resources.close()

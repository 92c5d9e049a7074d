"""An AOTInductor engine on the CPU behind the Engine protocol."""

from __future__ import annotations

import weakref
from contextlib import ExitStack

import torch

from runtime_service.engine.bindings import check_inputs, check_pool
from runtime_service.engine.engine import EngineInputs
from runtime_service.engine.weights import ModelWeights
from runtime_service.kv.pool import KVPool
from shared.bindings import Role
from shared.errors import InternalError
from shared.inductor.package import BoundPackage
from shared.manifest import EngineManifest


class InductorEngine:
    """Engine over a bound package. Holds `weights` so that the next engine of the model finds them mapped.

    `resources` are released by `close()`: the leases of the artifacts whose files are mapped.
    """

    def __init__(self, manifest: EngineManifest, package: BoundPackage, weights: ModelWeights, resources: ExitStack) -> None:
        self.manifest = manifest
        self._package: BoundPackage | None = package
        self._weights: ModelWeights | None = weights
        self._resources = resources
        self._inputs = tuple(b.name for b in manifest.bindings if b.role is Role.INPUT)
        self._checked_pool: weakref.ref[KVPool] | None = None

    def run(self, inputs: EngineInputs, pool: KVPool) -> torch.Tensor:
        """See Engine.run. A pool is checked when it is first used, inputs on every call."""
        if self._package is None:
            raise InternalError(f"engine {self.manifest.artifact_id} is closed")
        if self._checked_pool is None or self._checked_pool() is not pool:
            check_pool(pool, self.manifest)
            self._checked_pool = weakref.ref(pool)
        check_inputs(inputs, self.manifest, pool.num_pages)
        return self._package.run([*(getattr(inputs, name) for name in self._inputs), *pool.tensors])

    def close(self) -> None:
        """Let go of the code, the weights and the artifacts. Idempotent."""
        self._package = self._weights = None
        self._resources.close()

"""From two artifacts of the store, an engine and the model it was built for, to an Engine that may run.

An engine is believed only after it has been read back: the manifest's target and versions against this host, before any code
is mapped; the package's own constants, pools and instruction set against the manifest; and a probe, which runs it. Every
mismatch is a refusal that names both sides.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch
from safetensors.torch import load_file
from torch import Tensor

from runtime_service.engine.engine import Engine
from runtime_service.engine.graphs import GraphedSteps
from runtime_service.engine.host import check_host
from runtime_service.engine.inductor import HostSteps, InductorEngine
from runtime_service.engine.requirement import require
from runtime_service.engine.tensorrt import library
from runtime_service.engine.tensorrt.engine import TensorRTEngine, load_plan
from runtime_service.engine.tensorrt.probe import find_plan_faults
from runtime_service.engine.weights import ModelWeights, WeightsCache
from shared.artifacts.store import ArtifactHandle
from shared.bindings import Role, pool_name
from shared.errors import MemoryExhausted
from shared.inductor.files import CONSTANTS_FILE, PACKAGE_DIRECTORY
from shared.inductor.package import Package
from shared.inductor.probe import find_faults, without_positions
from shared.inductor.read_back import compare_pools
from shared.inductor.toolchain import CPU_ISA
from shared.manifest import EngineManifest, decode_engine_manifest, decode_model_manifest
from shared.tensorrt.files import PLAN_FILE

WEIGHTS_FILE = "weights.safetensors"
_PACKAGE_MARKER = f"{PACKAGE_DIRECTORY}/archive_format"


class EngineLoader:
    """Loads engines; those of one model share one mapping of its weights. Thread-safe."""

    def __init__(self) -> None:
        self._weights = WeightsCache()

    def load(self, engine: ArtifactHandle, model: ArtifactHandle) -> Engine:
        """The engine, bound to the model's weights. Takes both handles over: they are closed with it, or when loading fails.

        EngineIncompatible, naming the field, when the engine was not built for this host, these libraries or this model, or
        when it fails its probe; ArtifactCorrupt when a manifest or the package cannot be read; MemoryExhausted when a GPU is full.
        """
        try:
            return self._load(engine, model)
        except torch.OutOfMemoryError as error:
            raise MemoryExhausted(f"the GPU has no room for the engine and its weights: {error}. Unload another engine") from error

    def _load(self, engine: ArtifactHandle, model: ArtifactHandle) -> Engine:
        with ExitStack() as resources:
            resources.callback(engine.close)
            resources.callback(model.close)
            manifest = decode_engine_manifest(engine.manifest_bytes)
            check_host(manifest)
            model_id = decode_model_manifest(model.manifest_bytes).artifact_id
            require("model", manifest.model.model_id, model_id)
            if manifest.backend in library.BACKENDS:
                held = not manifest.constants  # such a plan brings its weights with it
                weights = ModelWeights({}) if held else self._weights.get(model_id, model.path(WEIGHTS_FILE), "cuda")
                launcher = load_plan(manifest, engine.path(PLAN_FILE), _bound_weights(manifest, weights))
                if faults := find_plan_faults(manifest, launcher, weights):
                    require("probe", "no fault", "; ".join(faults))
                return TensorRTEngine(manifest, launcher, weights, resources.pop_all())
            device = manifest.target.device
            package = Package(engine.path(_PACKAGE_MARKER).parent, device)
            check_package(manifest, package)
            weights = self._weights.get(model_id, model.path(WEIGHTS_FILE), device)
            constants = load_file(engine.path(CONSTANTS_FILE), device=device)
            bound = package.bind({**constants, **_bound_weights(manifest, weights)})
            run = bound.run if manifest.takes_positions else without_positions(bound.run)
            if faults := find_faults(run, manifest.cache, manifest.profiles, manifest.model.vocab_size, device):
                require("probe", "no fault", "; ".join(faults))
            steps = HostSteps(bound, manifest) if device == "cpu" else GraphedSteps(bound.run, manifest)
            return InductorEngine(manifest, steps, weights, resources.pop_all())


def check_package(manifest: EngineManifest, package: Package) -> None:
    """EngineIncompatible unless the package read back is the one the manifest describes."""
    require(f"toolchain.{CPU_ISA}", manifest.toolchain.get(CPU_ISA, "nothing"), package.cpu_isa)
    inputs = [binding for binding in manifest.bindings if binding.role is not Role.OUTPUT]
    require("bindings", f"{len(inputs)} inputs", f"{package.num_inputs} inputs")
    for mismatch in compare_pools(package.pool_uses, manifest.cache):
        require(mismatch.field, mismatch.expected, mismatch.got)
    promised = sorted(alias.input for alias in manifest.aliases if alias.input == alias.output)
    require("aliases", str(sorted(pool_name(layer) for layer in range(manifest.cache.num_layers))), str(promised))


def _bound_weights(manifest: EngineManifest, weights: ModelWeights) -> dict[str, Tensor]:
    """The engine's constants that are tensors of the model."""
    missing = sorted(set(manifest.constants.values()) - weights.tensors.keys())
    if missing:
        require("constants", f"a model with {', '.join(missing[:3])}", f"one of {len(weights.tensors)} tensors without")
    return {constant: weights.tensors[name] for constant, name in manifest.constants.items()}

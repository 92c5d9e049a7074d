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
from runtime_service.engine.inductor import HostSteps, InductorEngine
from runtime_service.engine.tensorrt import library
from runtime_service.engine.tensorrt.engine import TensorRTEngine, load_plan
from runtime_service.engine.tensorrt.probe import find_plan_faults
from runtime_service.engine.weights import ModelWeights, WeightsCache
from shared.artifacts.store import ArtifactHandle
from shared.bindings import Role, pool_name
from shared.compatibility import Device, Level, compare
from shared.errors import EngineIncompatible, MemoryExhausted
from shared.gpu import compute_capability
from shared.inductor.files import CONSTANTS_FILE, PACKAGE_DIRECTORY
from shared.inductor.isa import host_features
from shared.inductor.package import Package
from shared.inductor.probe import find_faults, without_positions
from shared.inductor.read_back import compare_pools
from shared.inductor.toolchain import CPU_ISA, runtime_toolchain
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
            _require("model", manifest.model.model_id, model_id)
            if manifest.backend in library.BACKENDS:
                held = not manifest.constants  # such a plan brings its weights with it
                weights = ModelWeights({}) if held else self._weights.get(model_id, model.path(WEIGHTS_FILE), "cuda")
                launcher = load_plan(manifest, engine.path(PLAN_FILE), _bound_weights(manifest, weights))
                if faults := find_plan_faults(manifest, launcher, weights):
                    _require("probe", "no fault", "; ".join(faults))
                return TensorRTEngine(manifest, launcher, weights, resources.pop_all())
            device = manifest.target.device
            package = Package(engine.path(_PACKAGE_MARKER).parent, device)
            check_package(manifest, package)
            weights = self._weights.get(model_id, model.path(WEIGHTS_FILE), device)
            constants = load_file(engine.path(CONSTANTS_FILE), device=device)
            bound = package.bind({**constants, **_bound_weights(manifest, weights)})
            run = bound.run if manifest.takes_positions else without_positions(bound.run)
            if faults := find_faults(run, manifest.cache, manifest.profiles, manifest.model.vocab_size, device):
                _require("probe", "no fault", "; ".join(faults))
            steps = HostSteps(bound, manifest) if device == "cpu" else GraphedSteps(bound.run, manifest)
            return InductorEngine(manifest, steps, weights, resources.pop_all())


def check_host(manifest: EngineManifest) -> None:
    """EngineIncompatible unless this host can run the engine. Looks at the manifest alone; nothing of the engine is mapped."""
    if manifest.backend in library.BACKENDS:
        library.check_host(manifest)
        return
    _require("backend", "inductor", manifest.backend)
    found = compare(manifest, _device_for(manifest))
    if found.level is Level.UNSUPPORTED:
        _require(found.field, found.expected, found.got)


def _device_for(manifest: EngineManifest) -> Device:
    """The device of this host that the engine would run on."""
    capability = compute_capability()
    if manifest.target.device == "cuda" and capability:
        return Device("cuda", frozenset(), capability, runtime_toolchain())
    return Device("cpu", host_features(), "", runtime_toolchain())


def check_package(manifest: EngineManifest, package: Package) -> None:
    """EngineIncompatible unless the package read back is the one the manifest describes."""
    _require(f"toolchain.{CPU_ISA}", manifest.toolchain.get(CPU_ISA, "nothing"), package.cpu_isa)
    inputs = [binding for binding in manifest.bindings if binding.role is not Role.OUTPUT]
    _require("bindings", f"{len(inputs)} inputs", f"{package.num_inputs} inputs")
    for mismatch in compare_pools(package.pool_uses, manifest.cache):
        _require(mismatch.field, mismatch.expected, mismatch.got)
    promised = sorted(alias.input for alias in manifest.aliases if alias.input == alias.output)
    _require("aliases", str(sorted(pool_name(layer) for layer in range(manifest.cache.num_layers))), str(promised))


def _bound_weights(manifest: EngineManifest, weights: ModelWeights) -> dict[str, Tensor]:
    """The engine's constants that are tensors of the model."""
    missing = sorted(set(manifest.constants.values()) - weights.tensors.keys())
    if missing:
        _require("constants", f"a model with {', '.join(missing[:3])}", f"one of {len(weights.tensors)} tensors without")
    return {constant: weights.tensors[name] for constant, name in manifest.constants.items()}


def _require(field: str, expected: str, got: str) -> None:
    if expected != got:
        raise EngineIncompatible(
            f"{field}: the engine needs {expected}, here is {got}; compile it again for this host",
            details={"field": field, "expected": expected, "got": got},
        )

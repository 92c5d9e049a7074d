"""From two artifacts of the store, an engine and the model it was built for, to an Engine that may run.

An engine is believed only after it has been read back: the manifest's target and versions against this host, before any code
is mapped; then the package's own constants, pools and instruction set against the manifest. Every mismatch is a refusal that
names both sides.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from safetensors.torch import load_file
from torch import Tensor

from runtime_service.engine.engine import Engine
from runtime_service.engine.inductor import InductorEngine
from shared.artifacts.store import ArtifactHandle
from shared.bindings import Role
from shared.errors import EngineIncompatible
from shared.inductor.files import CONSTANTS_FILE, PACKAGE_DIRECTORY
from shared.inductor.isa import host_features
from shared.inductor.package import Package
from shared.inductor.toolchain import CPU_ISA, runtime_toolchain
from shared.manifest import EngineManifest, decode_engine_manifest, decode_model_manifest

WEIGHTS_FILE = "weights.safetensors"


@dataclass(slots=True, weakref_slot=True)
class _Weights:
    """The tensors of one model, mapped from its file."""

    tensors: Mapping[str, Tensor]


class EngineLoader:
    """Loads engines; those of one model share one mapping of its weights. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._weights: weakref.WeakValueDictionary[str, _Weights] = weakref.WeakValueDictionary()

    def load(self, engine: ArtifactHandle, model: ArtifactHandle) -> Engine:
        """The engine, bound to the model's weights. Takes both handles over: they are closed with it, or when loading fails.

        EngineIncompatible, naming the field, when the engine was not built for this host, these libraries or this model;
        ArtifactCorrupt when a manifest or the package cannot be read.
        """
        with ExitStack() as resources:
            resources.callback(engine.close)
            resources.callback(model.close)
            manifest = decode_engine_manifest(engine.manifest_bytes)
            check_host(manifest)
            model_id = decode_model_manifest(model.manifest_bytes).artifact_id
            _require("model", manifest.model.model_id, model_id)
            package = Package(engine.path(f"{PACKAGE_DIRECTORY}/archive_format").parent)
            check_package(manifest, package)
            weights = self._weights_of(model_id, model)
            resources.callback(_release, weights)
            constants = load_file(engine.path(CONSTANTS_FILE))
            for name, tensor in manifest.constants.items():
                if tensor not in weights.tensors:
                    _require(f"constants.{name}", tensor, "no such tensor in the model's weights")
                constants[name] = weights.tensors[tensor]
            return InductorEngine(manifest, package.bind(constants), resources.pop_all())

    def _weights_of(self, model_id: str, model: ArtifactHandle) -> _Weights:
        with self._lock:
            weights = self._weights.get(model_id)
            if weights is None:
                # safetensors maps the file: its pages are shared and read when first touched.
                weights = self._weights[model_id] = _Weights(load_file(model.path(WEIGHTS_FILE)))
            return weights


def _release(weights: _Weights) -> None:
    """Keeps `weights` referenced by the engine that holds this callback, and by nobody once it has run."""


def check_host(manifest: EngineManifest) -> None:
    """EngineIncompatible unless this host can run the engine. Looks at the manifest alone; nothing of the engine is mapped."""
    _require("backend", "inductor", manifest.backend)
    _require("target.device", "cpu", manifest.target.device)
    if missing := sorted(set(manifest.target.isa) - host_features()):
        _require("target.isa", " ".join(manifest.target.isa), f"a CPU without {' '.join(missing)}")
    for name, here in runtime_toolchain().items():
        _require(f"toolchain.{name}", manifest.toolchain.get(name, "nothing"), here)


def check_package(manifest: EngineManifest, package: Package) -> None:
    """EngineIncompatible unless the package read back is the one the manifest describes."""
    _require(f"toolchain.{CPU_ISA}", manifest.toolchain.get(CPU_ISA, "nothing"), package.cpu_isa)
    inputs = [binding for binding in manifest.bindings if binding.role is not Role.OUTPUT]
    _require("bindings", f"{len(inputs)} inputs", f"{package.num_inputs} inputs")
    pools = [(manifest.cache.layout.page_dim, group.window) for _, group in manifest.cache.iter_layers()]
    _require("cache", str(pools), str([(use.page_dim, use.window) for use in package.pool_uses]))
    names = [f"kv_pool.{layer}" for layer in range(manifest.cache.num_layers)]
    _require("aliases", str(sorted(names)), str(sorted(alias.input for alias in manifest.aliases if alias.input == alias.output)))
    if copied := [use.pool for use in package.pool_uses if not use.in_place]:
        _require("aliases", "every pool written in place", f"a copy of {', '.join(copied)}")


def _require(field: str, expected: str, got: str) -> None:
    if expected != got:
        raise EngineIncompatible(
            f"{field}: the engine needs {expected}, here is {got}; compile it again for this host",
            details={"field": field, "expected": expected, "got": got},
        )

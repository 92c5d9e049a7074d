"""A TensorRT engine behind the Engine protocol: slots of a linear pool as its rows."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from runtime_service.engine.bindings import check_inputs, check_pool
from runtime_service.engine.engine import EngineInputs
from runtime_service.engine.tensorrt.launch import Launch, Launcher
from runtime_service.engine.tensorrt.library import load_library
from runtime_service.engine.tensorrt.read_back import check_plan
from runtime_service.engine.tensorrt.slots import slot_runs
from runtime_service.engine.weights import ModelWeights
from runtime_service.kv.pool import KVPool
from shared.bindings import INPUT_IDS, LAST_INDEX, POSITION_IDS, WRITE_START
from shared.errors import EngineIncompatible, InternalError
from shared.kv_spec import Layout
from shared.manifest import EngineManifest
from shared.profiles import Phase


def load_plan(manifest: EngineManifest, plan: Path, weights: Mapping[str, Tensor]) -> Launcher:
    """`plan` on the current CUDA device, compared with `manifest` and bound to `weights` (device tensors by binding name).

    EngineIncompatible when it does not deserialize here, or is not what the manifest says.
    """
    _check_manifest(manifest)
    trt = load_library(manifest.backend)
    runtime = trt.Runtime(trt.Logger(trt.Logger.WARNING))
    engine = runtime.deserialize_cuda_engine(plan.read_bytes())
    if engine is None:
        raise EngineIncompatible(
            f"the plan does not deserialize on {torch.cuda.get_device_name()}; compile it again for this host",
            details={"field": "target", "expected": " ".join(manifest.target.compute_capabilities), "got": "no engine"},
        )
    check_plan(trt, engine, manifest)
    return Launcher(trt, engine, manifest, weights)


class TensorRTEngine:
    """Engine over a loaded plan. Holds `weights`, which engines of one model share.

    `graphs`: decode steps are captured once for each number of rows and first slot, then replayed. `resources` are released
    by `close()`.
    """

    def __init__(
        self, manifest: EngineManifest, launcher: Launcher, weights: ModelWeights, resources: ExitStack, *, graphs: bool = True
    ) -> None:
        self.manifest = manifest
        self._launcher: Launcher | None = launcher
        self._weights: ModelWeights | None = weights
        self._graphs = graphs
        self._resources = resources
        self._checked_pool: weakref.ref[KVPool] | None = None

    def run(self, inputs: EngineInputs, pool: KVPool) -> torch.Tensor:
        """See Engine.run; logits are on the host. Logits of padding rows (slot 0) are zeros, and nothing is written for them."""
        if self._launcher is None:
            raise InternalError(f"engine {self.manifest.artifact_id} is closed")
        if self._checked_pool is None or self._checked_pool() is not pool:
            check_pool(pool, self.manifest)
            self._checked_pool = weakref.ref(pool)
        check_inputs(inputs, self.manifest, pool.num_pages)
        profiles = self.manifest.profiles
        max_rows = profiles[inputs.profile].batch.max
        logits = torch.zeros(inputs.batch, self.manifest.model.vocab_size)
        for run in slot_runs(inputs.block_table[:, 0].tolist(), max_rows):
            rows = list(run.rows)
            launch = Launch(profiles.index(inputs.profile), len(rows), inputs.query_len, run.first_slot)
            tokens = {
                INPUT_IDS: inputs.input_ids[rows],
                POSITION_IDS: inputs.position_ids[rows],
                WRITE_START: inputs.write_start[rows],
                LAST_INDEX: inputs.last_index[rows],
            }
            capture = self._graphs and inputs.profile == Phase.DECODE
            logits[rows] = self._launcher.run(launch, tokens, pool, capture=capture).cpu()
        return logits

    def close(self) -> None:
        """Let go of the plan, the weights and the artifacts. Idempotent."""
        if self._launcher is not None:
            self._launcher.close()
        self._launcher = self._weights = None
        self._resources.close()


def _check_manifest(manifest: EngineManifest) -> None:
    """What this engine's way of binding slots as rows asks for."""
    smallest = max(profile.batch.min for profile in manifest.profiles.profiles)
    for field, expected, got in (
        ("cache.layout", Layout.LINEAR.value, manifest.cache.layout.value),
        ("profiles", "batches from 1", f"batches from {smallest}"),
    ):
        if expected != got:
            raise EngineIncompatible(
                f"{field}: a TensorRT engine here needs {expected}, the manifest states {got}",
                details={"field": field, "expected": expected, "got": got},
            )

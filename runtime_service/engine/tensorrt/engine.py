"""A TensorRT engine behind the Engine protocol: slots of a linear pool as its rows, or pages of a paged one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from runtime_service.engine.bindings import StepCheck
from runtime_service.engine.engine import EngineInputs
from runtime_service.engine.tensorrt.launch import Launch, Launcher
from runtime_service.engine.tensorrt.library import load_library
from runtime_service.engine.tensorrt.packed import pack_write
from runtime_service.engine.tensorrt.read_back import check_plan
from runtime_service.engine.tensorrt.slots import slot_runs
from runtime_service.engine.weights import ModelWeights
from runtime_service.kv.pool import KVPool
from shared.bindings import (
    BLOCK_TABLE,
    INPUT_IDS,
    LAST_INDEX,
    PACKED_ENDS,
    PACKED_OFFSETS,
    PACKED_ORDER,
    POSITION_IDS,
    WRITE_START,
)
from shared.errors import EngineIncompatible, InternalError
from shared.kernels.upload import select_rows, upload
from shared.kv_spec import Layout
from shared.manifest import EngineManifest
from shared.profiles import Phase

_Step = tuple[Launch, list[int], dict[str, Tensor]]
"""A launch, the rows of the batch it serves, and its inputs."""


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

    `graphs`: decode steps are captured once for each number of rows and first slot, then replayed; such steps wait for nothing.
    `resources` are released by `close()`.
    """

    def __init__(
        self, manifest: EngineManifest, launcher: Launcher, weights: ModelWeights, resources: ExitStack, *, graphs: bool = True
    ) -> None:
        self.manifest = manifest
        self.runs_ahead = True
        self._launcher: Launcher | None = launcher
        self._weights: ModelWeights | None = weights
        self._graphs = graphs
        self._resources = resources
        self._check = StepCheck(manifest)

    def run(self, inputs: EngineInputs, pool: KVPool) -> torch.Tensor:
        """See Engine.run; logits are on the device, overwritten by the next step. Those of rows that no launch serves are zeros:
        padding rows in slot 0, and a step of nothing but padding. Nothing is written for padding."""
        if self._launcher is None:
            raise InternalError(f"engine {self.manifest.artifact_id} is closed")
        self._check(inputs, pool)
        capture = self._graphs and inputs.profile == Phase.DECODE
        launches = self._over_slots if pool.spec.layout is Layout.LINEAR else self._over_pages
        gathered: Tensor | None = None
        for launch, rows, tokens in launches(inputs, pool):
            logits = self._launcher.run(launch, tokens, pool, capture=capture)
            if rows == list(range(inputs.batch)):
                return logits
            if gathered is None:
                gathered = logits.new_zeros(inputs.batch, logits.shape[1])
            gathered.index_copy_(0, upload(torch.tensor(rows), pool.device), logits)
        if gathered is None:
            return torch.zeros(inputs.batch, self.manifest.model.vocab_size, device=pool.device)
        return gathered

    def _over_slots(self, inputs: EngineInputs, pool: KVPool) -> Iterator[_Step]:
        """A launch for each run of neighbouring slots."""
        profile = self.manifest.profiles.index(inputs.profile)
        max_rows = self.manifest.profiles[inputs.profile].batch.max
        for run in slot_runs(inputs.block_table[:, 0].tolist(), max_rows):
            rows = list(run.rows)
            yield Launch(profile, len(rows), inputs.query_len, first_slot=run.first_slot), rows, _tokens(inputs, rows)

    def _over_pages(self, inputs: EngineInputs, pool: KVPool) -> Iterator[_Step]:
        """One launch, unless every row is padding."""
        spec = pool.spec
        write = pack_write(inputs.block_table, inputs.write_start, inputs.query_len, spec.page_size, pool.num_pages)
        if write.order.numel():
            rows = list(range(inputs.batch))
            packed = {PACKED_ORDER: write.order, PACKED_ENDS: write.ends, PACKED_OFFSETS: write.offsets}
            profile = self.manifest.profiles.index(inputs.profile)
            launch = Launch(profile, inputs.batch, inputs.query_len, num_packed=write.order.numel())
            yield launch, rows, {**_tokens(inputs, rows), BLOCK_TABLE: inputs.block_table, **packed}

    def close(self) -> None:
        """Let go of the plan, the weights and the artifacts. Idempotent."""
        if self._launcher is not None:
            self._launcher.close()
        self._launcher = self._weights = None
        self._resources.close()


def _check_manifest(manifest: EngineManifest) -> None:
    """What this engine's way of binding slots as rows asks for."""
    smallest = max(profile.batch.min for profile in manifest.profiles.profiles)
    if smallest > 1:
        raise EngineIncompatible(
            f"profiles: a TensorRT engine here needs batches from 1, the manifest states batches from {smallest}",
            details={"field": "profiles", "expected": "batches from 1", "got": f"batches from {smallest}"},
        )


def _tokens(inputs: EngineInputs, rows: list[int]) -> dict[str, Tensor]:
    names = (INPUT_IDS, POSITION_IDS, WRITE_START, LAST_INDEX)
    return {name: select_rows(getattr(inputs, name), rows) for name in names}

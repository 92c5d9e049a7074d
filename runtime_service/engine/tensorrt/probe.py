"""A loaded plan tried before it is believed: its own report of aliases is words, this is what it does."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from torch import Tensor

from runtime_service.engine.engine import EngineInputs
from runtime_service.engine.tensorrt.engine import TensorRTEngine
from runtime_service.engine.tensorrt.launch import Launcher
from runtime_service.engine.weights import ModelWeights
from runtime_service.kv.pool import KVPool
from shared.inductor.probe import find_faults
from shared.manifest import EngineManifest

_NUM_INPUTS = 5


def find_plan_faults(manifest: EngineManifest, launcher: Launcher, weights: ModelWeights) -> list[str]:
    """Everything wrong with the plan of `launcher`; empty if nothing was found. Writes land in place, in proven cells alone, and a
    prefill agrees with the same tokens decoded one by one. The launcher is as new afterwards."""
    # Without graphs: every step comes with pools of its own, and a graph is for one pool.
    engine = TensorRTEngine(manifest, launcher, weights, ExitStack(), graphs=False)

    def run(inputs: Sequence[Tensor]) -> Tensor:
        tokens, pools = [tensor.cpu() for tensor in inputs[:_NUM_INPUTS]], inputs[_NUM_INPUTS:]
        batch, query_len = tokens[0].shape
        profile = next(p.name for p in manifest.profiles.profiles if p.admits(batch, query_len))
        # Of their own: the next step overwrites an engine's logits, and steps are compared.
        return engine.run(EngineInputs(profile, *tokens), KVPool.over(manifest.cache, pools)).clone()

    try:
        return find_faults(run, manifest.cache, manifest.profiles, manifest.model.vocab_size, manifest.target.device)
    finally:
        launcher.close()

"""A Launcher without TensorRT: a tiny decoder on the CPU runs the launches, and its logits lie where each run overwrites them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from runtime_service.engine.engine import EngineInputs
from runtime_service.engine.tensorrt.launch import Launch, input_layout
from runtime_service.kv.pool import KVPool
from shared.bindings import BLOCK_TABLE, INPUT_IDS, LAST_INDEX, POSITION_IDS, WRITE_START
from shared.kv_spec import Layout
from tests.support.tiny_engine import TinyEngine

Misdeed = Callable[[KVPool, Tensor, int], None]
"""Called after a launch with the pool, the launch's write starts and its first slot."""


class TinyLauncher:
    """Runs launches as a plan would, then does `misdeed` to the pool."""

    def __init__(self, engine: TinyEngine, misdeed: Misdeed | None = None) -> None:
        self.engine, self.misdeed = engine, misdeed
        self.launches: list[Launch] = []
        self.closed = False
        manifest = engine.manifest
        self._logits = torch.empty(manifest.profiles.max_batch, manifest.model.vocab_size)

    def run(self, launch: Launch, tokens: Mapping[str, Tensor], pool: KVPool, *, capture: bool) -> Tensor:
        self.launches.append(launch)
        layout = input_layout(launch, self.engine.manifest, pool.num_pages)
        buffer = torch.empty(layout.size, dtype=torch.int32)
        layout.bring(tokens, buffer)
        table = launch.first_slot + torch.arange(launch.rows, dtype=torch.int32)[:, None]
        if self.engine.manifest.cache.layout is Layout.PAGED:
            table = layout.view(buffer, BLOCK_TABLE)
        profile = self.engine.manifest.profiles.profiles[launch.profile].name
        named = (layout.view(buffer, name) for name in (INPUT_IDS, POSITION_IDS, WRITE_START, LAST_INDEX))
        logits = self._logits[: launch.rows]
        logits.copy_(self.engine.run(EngineInputs(profile, *named, table), pool))
        if self.misdeed is not None:
            self.misdeed(pool, tokens[WRITE_START], launch.first_slot)
        return logits

    def close(self) -> None:
        self.closed = True

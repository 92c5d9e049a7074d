"""What the TensorRT checks have in common: a line of their table, and an engine over a pool of junk."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from runtime_service.engine.engine import EngineInputs
from runtime_service.engine.host import check_host
from runtime_service.engine.tensorrt.engine import TensorRTEngine, load_plan
from runtime_service.engine.weights import WeightsCache
from runtime_service.kv.pool import KVPool
from shared.manifest import EngineManifest, decode_engine_manifest

JUNK = 1e4
LEAST_COSINE = 0.9999


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    check: str
    expected: str
    got: str
    holds: bool


@dataclass
class Engine:
    """An engine, its weights, and a pool of junk with `slots` slots after the dump slot."""

    directory: Path
    slots: int
    graphs: bool = True

    def __post_init__(self) -> None:
        self.manifest: EngineManifest = decode_engine_manifest((self.directory / "manifest.json").read_bytes())
        check_host(self.manifest)
        self.weights = CACHE.get(self.directory.name, self.directory / "weights.safetensors", "cuda")
        self.load(self.directory / "engine.plan")
        self.pool = KVPool(self.manifest.cache, 1 + self.slots, "cuda")
        for tensor in self.pool.tensors:
            tensor.fill_(JUNK)

    def load(self, plan: Path) -> None:
        self.launcher = load_plan(self.manifest, plan, self.weights.tensors)
        self.engine = TensorRTEngine(self.manifest, self.launcher, self.weights, ExitStack(), graphs=self.graphs)

    def step(self, profile: str, table: Tensor | list[int], ids: Tensor, starts: Tensor, last: int | None = None) -> Tensor:
        """Logits, on the host. `table` is the block table of each row, or its slot."""
        count = ids.shape[1]
        positions = starts[:, None] + torch.arange(count, dtype=torch.int32)
        last_index = torch.full((len(table),), count - 1 if last is None else last, dtype=torch.int32)
        if not isinstance(table, Tensor):
            table = torch.tensor(table, dtype=torch.int32)[:, None]
        return self.engine.run(EngineInputs(profile, ids, positions, starts, last_index, table), self.pool).cpu()


CACHE = WeightsCache()

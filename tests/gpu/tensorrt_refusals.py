"""What may not reach a launch and what may not be loaded; and what happens where nobody checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from runtime_service.engine.host import check_host
from runtime_service.engine.tensorrt.engine import load_plan
from runtime_service.engine.tensorrt.launch import Launch
from runtime_service.engine.tensorrt.library import load_library
from runtime_service.kv.pool import K
from shared.errors import EngineIncompatible, FieldOutOfRange
from tests.gpu.tensorrt_engine import JUNK, Engine, Row


def check_hazards(root: Path) -> list[Row]:
    """What happens where nobody checks: why a reader of the old value and a start out of range are refused."""
    trt = load_library("tensorrt_rtx")
    plan = trt.Runtime(trt.Logger(trt.Logger.WARNING)).deserialize_cuda_engine((root / "hazard" / "engine.plan").read_bytes())
    context = plan.create_execution_context()
    cache, update = torch.ones(1, 2, 8, 4, device="cuda"), torch.full((1, 2, 3, 4), 5.0, device="cuda")
    start, old = torch.tensor([2], dtype=torch.int32, device="cuda"), torch.empty(1, 2, 8, 4, device="cuda")
    for name, tensor in (("cache", cache), ("update", update), ("start", start), ("cache.updated", cache), ("old", old)):
        context.set_tensor_address(name, tensor.data_ptr())
    torch.cuda.synchronize()
    context.execute_async_v3(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    seen = (old[0, 0, :, 0] / 2).tolist()
    new = [1.0, 1.0, 5.0, 5.0, 5.0, 1.0, 1.0, 1.0]
    engine = Engine(root / "batch", slots=2)
    max_len = engine.manifest.cache.max_len
    ids, zeros = torch.full((1, 4), 3, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    inputs = {"input_ids": ids, "position_ids": ids, "write_start": zeros + max_len - 2, "last_index": zeros}
    launch = Launch(engine.manifest.profiles.index("prefill"), 1, 4, first_slot=1)
    engine.launcher.run(launch, inputs, engine.pool, capture=False)
    torch.cuda.synchronize()
    changed = (engine.pool.tensors[0][K, :, 0] != JUNK).any(-1)
    kept, elsewhere = int(changed[1, max_len - 2 :].sum()), int(changed.sum())
    got = "the new one" if seen == new else str(seen)
    return [
        Row("unchecked: a reader of the old value gets", "the new one", got, seen == new),
        Row("unchecked: of 4 tokens from 2 cells before the end, kept", "2", str(kept), kept == 2),
        Row("unchecked: cells written in all", "2", str(elsewhere), elsewhere == 2),
    ]


def check_refusals(root: Path) -> list[Row]:
    """What may not reach a launch, and what may not be loaded."""
    engine = Engine(root / "batch", slots=8)
    max_len = engine.manifest.cache.max_len
    ids = torch.ones(1, 4, dtype=torch.int32)

    def out_of_range() -> None:
        engine.step("prefill", [1], ids, torch.tensor([max_len - 3], dtype=torch.int32))

    def one_slot_twice() -> None:
        engine.step("prefill", [1, 1], ids.repeat(2, 1), torch.zeros(2, dtype=torch.int32))

    def loaded_with(**changes: Any) -> Callable[[], None]:
        manifest = replace(engine.manifest, **changes)
        return lambda: check_host(manifest)

    def without_an_alias() -> None:
        manifest = replace(engine.manifest, aliases=engine.manifest.aliases[1:])
        load_plan(manifest, root / "batch" / "engine.plan", engine.weights.tensors)

    newer = replace(engine.manifest.target, compute_capabilities=("sm120",))
    other = engine.manifest.toolchain | {engine.manifest.backend: "0.0.1"}
    attempts: list[tuple[str, type[Exception], Callable[[], None]]] = [
        ("a start whose tokens would vanish", FieldOutOfRange, out_of_range),
        ("one slot for two rows", FieldOutOfRange, one_slot_twice),
        ("an engine for another GPU", EngineIncompatible, loaded_with(target=newer)),
        ("an engine of another library version", EngineIncompatible, loaded_with(toolchain=other)),
        ("a plan with an alias the manifest does not state", EngineIncompatible, without_an_alias),
    ]
    rows = []
    for what, error, attempt in attempts:
        try:
            attempt()
            got = "accepted"
        except error as refusal:
            got = type(refusal).__name__
        rows.append(Row(f"refused: {what}", error.__name__, got, got == error.__name__))
    return rows

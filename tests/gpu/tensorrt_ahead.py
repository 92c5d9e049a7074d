"""Steps launched before the host has seen what the last ones said: no wait among them, the tokens of steps taken one by one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from runtime_service.engine.engine import EngineInputs
from tests.gpu.tensorrt_engine import Engine, Row

ROWS, PROMPT, STEPS = 5, 4, 8
SLOTS = [3, 1, 8, 4, 6]
"""Four launches a step, whose logits are gathered."""
_BUSY_CYCLES = 2_000_000_000
"""About a second in which the device gets to nothing else: what waits for it is seen to wait."""


def check_ahead(root: Path) -> list[Row]:
    """With the ids of every step on the device, where the last step's logits chose them."""
    rows = []
    for name, slots in (("batch", 8), ("paged", 48)):
        engine = Engine(root / name, slots)
        pages = engine.manifest.cache.max_pages
        table = torch.tensor(SLOTS, dtype=torch.int32)[:, None]
        if pages > 1:
            table = 1 + torch.arange(ROWS * pages, dtype=torch.int32).view(ROWS, pages)
        ids = torch.arange(1, 1 + ROWS * PROMPT, dtype=torch.int32).view(ROWS, PROMPT)
        first = engine.step("prefill", table, ids, torch.zeros(ROWS, dtype=torch.int32)).argmax(-1, keepdim=True).int()
        one_by_one = _decode(engine, table, first, ahead=False)
        _reserve_pinned()
        first = first.cuda()
        torch.cuda.synchronize()
        torch.cuda._sleep(_BUSY_CYCLES)
        with _waits_are_errors():
            launched = _decode(engine, table, first, ahead=True)
            end = torch.cuda.Event()
            end.record()
        waited = end.query()
        same = int((torch.stack(launched).cpu() == torch.stack(one_by_one)).sum())
        total = STEPS * ROWS
        rows += [
            Row(f"{name}: {STEPS} decode steps launched while the device is busy", "yes", "no" if waited else "yes", not waited),
            Row(f"{name}: their tokens equal those of steps one by one", f"{total}/{total}", f"{same}/{total}", same == total),
        ]
    return rows


def _decode(engine: Engine, table: Tensor, ids: Tensor, *, ahead: bool) -> list[Tensor]:
    """Greedy ids `[rows, 1]` of every step: on the device if `ahead`, else seen by the host before the next step."""
    chosen: list[Tensor] = []
    last = torch.zeros(ROWS, dtype=torch.int32)
    for step in range(STEPS):
        start = torch.full((ROWS,), PROMPT + step, dtype=torch.int32)
        logits = engine.engine.run(EngineInputs("decode", ids, start[:, None].contiguous(), start, last, table), engine.pool)
        ids = logits.argmax(-1, keepdim=True).int()
        ids = ids if ahead else ids.cpu()
        chosen.append(ids)
    return chosen


def _reserve_pinned() -> None:
    """Torch keeps what is given back here. A serving loop has one step in flight and uses memory again; here are many, and the
    driver, asked for more while the device is busy, may wait for it."""
    blocks = [torch.empty(1 << bits, dtype=torch.uint8, pin_memory=True) for bits in range(9, 17) for _ in range(16 * STEPS)]
    del blocks


@contextmanager
def _waits_are_errors() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")

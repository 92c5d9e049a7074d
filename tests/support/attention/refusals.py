"""Arguments that `quire::paged_attend` must refuse, by the start of the checked wrapper's message."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.support.attention.cases import Inputs


def replaced(**changes: Callable[[Inputs], object]) -> Callable[[Inputs], dict[str, object]]:
    def build(inputs: Inputs) -> dict[str, object]:
        names = ("q", "k", "v", "pool", "block_table", "start", "page_dim", "scale", "window", "softcap", "sinks")
        arguments = dict(zip(names, inputs.paged_arguments(), strict=True))
        return arguments | {name: change(inputs) for name, change in changes.items()}

    return build


REFUSED = {
    "q: expected [batch": replaced(q=lambda i: i.q[0]),
    "q: expected float32": replaced(
        q=lambda i: i.q.double(), k=lambda i: i.k.double(), v=lambda i: i.v.double(), pool=lambda i: i.pool.double()
    ),
    "q: expected a multiple of 2 kv heads, got 3 heads": replaced(q=lambda i: i.q[:, :3]),
    "k: expected (": replaced(k=lambda i: i.k[:, :1]),
    "v: expected (": replaced(v=lambda i: i.v[:, :, :1].expand(-1, -1, 7, -1)),
    "k: expected torch.float32 like q": replaced(k=lambda i: i.k.half()),
    "pool: expected torch.float32 like q": replaced(pool=lambda i: i.pool.half()),
    "pool: expected 5 axes": replaced(pool=lambda i: i.pool[0]),
    "pool: expected 2 planes": replaced(pool=lambda i: i.pool[:, :1]),
    "pool: expected head_dim 64": replaced(pool=lambda i: i.pool[..., :32]),
    "pool: expected head_dim of stride 1": replaced(pool=lambda i: i.pool.repeat_interleave(2, -1)[..., ::2]),
    "page_dim: expected 0 (paged) or 1": replaced(page_dim=lambda i: 2),
    "block_table: expected int32": replaced(block_table=lambda i: i.table.long()),
    "block_table: expected [3, max_pages]": replaced(block_table=lambda i: i.table[:2]),
    "block_table[1, 2]: expected a page in 0..19, got 20": replaced(block_table=lambda i: poke(i.table, (1, 2), 20)),
    "block_table[0, 0]: expected a page in 0..19, got -1": replaced(block_table=lambda i: poke(i.table, (0, 0), -1)),
    "start: expected int32": replaced(start=lambda i: i.start.long()),
    "start: expected (3,)": replaced(start=lambda i: i.start[:1]),
    "start[0]: expected 0..94": replaced(start=lambda i: poke(i.start, (0,), -1)),
    "start[2]: expected 0..94 (room for 2 new tokens in 96 cells), got 95": replaced(start=lambda i: poke(i.start, (2,), 95)),
    "window: expected at least 1": replaced(window=lambda i: 0),
    "softcap: expected above 0": replaced(softcap=lambda i: 0.0),
    "sinks: expected (4,)": replaced(sinks=lambda i: torch.zeros(3)),
    "sinks: expected": replaced(sinks=lambda i: torch.zeros(4, dtype=torch.int32)),
}


def poke(tensor: Tensor, at: tuple[int, ...], value: int) -> Tensor:
    changed = tensor.clone()
    changed[at] = value
    return changed

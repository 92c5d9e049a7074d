"""Drive a decoder step, exported or compiled, over ragged batches as the runtime would: caches of junk, padding at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from compiler_service.export.program import DecoderProgram
from shared.kv_spec import KVCacheSpec, Layout

JUNK = 1e4
"""Fills every cell nobody has written: seen once, it decides the answer."""


def int32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


Feed = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""input_ids, position_ids, write_start, last_index -> logits."""


@dataclass
class Rows:
    """The rows of one batch over one set of caches."""

    feed: Feed
    batch: int
    lengths: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lengths = [0] * self.batch
        self.positions = [0] * self.batch

    def step(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Feed every row its new tokens (at least one); shorter rows are padded with token 0. Logits of each row's last token."""
        longest = max(map(len, tokens))
        ids = int32([[*row, *[0] * (longest - len(row))] for row in tokens])
        positions = int32(self.positions)[:, None] + torch.arange(longest, dtype=torch.int32)
        logits = self.feed(ids, positions, int32(self.lengths), int32([len(row) - 1 for row in tokens]))
        for row, new in enumerate(tokens):
            self.lengths[row] += len(new)
            self.positions[row] += len(new)
        return logits


def greedy_rows(rows: Rows, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Prefill all prompts in one padded step, then decode `count` tokens a row together."""
    logits = rows.step(prompts)
    out: list[list[int]] = [[] for _ in prompts]
    for _ in range(count):
        chosen = logits.argmax(-1).tolist()
        for row, token in enumerate(chosen):
            out[row].append(token)
        logits = rows.step([[token] for token in chosen])
    return out


class LinearCaches:
    """K and V of every layer as the linear program takes them, `[batch, kv_heads, max_len, head_dim]`."""

    def __init__(self, spec: KVCacheSpec, batch: int, max_len: int) -> None:
        def junk() -> list[Tensor]:
            return [
                torch.full((batch, group.kv_heads, max_len, group.head_dim), JUNK, dtype=getattr(torch, group.dtype.value))
                for _, group in spec.iter_layers()
            ]

        self.k, self.v = junk(), junk()


def junk_pools(spec: KVCacheSpec, num_pages: int) -> list[Tensor]:
    return [
        torch.full(spec.pool_shape(group, num_pages), JUNK, dtype=getattr(torch, group.dtype.value))
        for _, group in spec.iter_layers()
    ]


def scattered_table(spec: KVCacheSpec, batch: int, num_pages: int) -> Tensor:
    """Every row its own pages, none next to another; page 0 stays out."""
    order = 1 + torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(7))
    return order[: batch * spec.max_pages].to(torch.int32).view(batch, spec.max_pages)


def pages_needed(spec: KVCacheSpec, batch: int) -> int:
    return 1 + batch * spec.max_pages + (3 if spec.layout is Layout.PAGED else 1)


def with_weights(program: DecoderProgram, weights: dict[str, Tensor]) -> torch.nn.Module:
    """The program as a module to run eagerly, bound to a model's state dict."""
    module = program.program.module(check_guards=False)
    module.load_state_dict({name: weights[stored] for name, stored in program.weights.items()}, strict=False, assign=True)
    return module


def feed_linear(program: DecoderProgram, weights: dict[str, Tensor], caches: LinearCaches) -> Feed:
    module = with_weights(program, weights)
    return lambda ids, positions, start, last: module(ids, positions, start, last, caches.k, caches.v)


def feed_pools(run: Callable[[list[Tensor]], Tensor], table: Tensor, pools: list[Tensor]) -> Feed:
    return lambda ids, positions, start, last: run([ids, positions, start, last, table, *pools])

"""A made-up step for trying an engine: random tokens behind a random history, on pages scattered over a pool of noise."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kv_spec import KVCacheSpec

NOISE_CELLS = 256
"""How many cells of each page hold noise; the rest are zeros. A page of the paged layout is never longer, and what nobody
touches of a linear row takes no memory."""


@dataclass(frozen=True, slots=True)
class SampleStep:
    """Inputs of one step as an engine takes them; `pools` is one tensor a layer. Every row has `start` entries of history."""

    input_ids: Tensor
    position_ids: Tensor
    write_start: Tensor
    last_index: Tensor
    block_table: Tensor
    pools: tuple[Tensor, ...]

    @property
    def inputs(self) -> list[Tensor]:
        return [self.input_ids, self.position_ids, self.write_start, self.last_index, self.block_table, *self.pools]

    def chunk(self, tokens: slice) -> SampleStep:
        """The step that feeds only these of the new tokens (`slice` with both bounds), on the same pools.

        Its inputs are memory of their own: at an odd address Inductor's kernels would copy them first, and say so.
        """
        return SampleStep(
            input_ids=self.input_ids[:, tokens].clone(memory_format=torch.contiguous_format),
            position_ids=self.position_ids[:, tokens].clone(memory_format=torch.contiguous_format),
            write_start=self.write_start + tokens.start,
            last_index=torch.full_like(self.last_index, tokens.stop - tokens.start - 1),
            block_table=self.block_table,
            pools=self.pools,
        )


def sample_step(
    cache: KVCacheSpec,
    vocab_size: int,
    *,
    batch: int,
    query_len: int,
    start: int,
    num_pages: int | None = None,
    device: str = "cpu",
) -> SampleStep:
    """A step of `batch` rows that write ordinals `start..start + query_len`; `num_pages` of the pool default to what they need.

    The same values every time, on every `device`.
    """
    generator = torch.Generator().manual_seed(0)
    pages_per_row = cache.pages_for(start + query_len)
    needed = 1 + batch * pages_per_row
    num_pages = num_pages or needed
    # Page 0 is the dump page. A random order, so that neighbours in a sequence are none in the pool.
    pages = 1 + torch.randperm(num_pages - 1, generator=generator)[: needed - 1]
    pools = []
    for _, group in cache.iter_layers():
        pool = torch.zeros(cache.pool_shape(group, num_pages), dtype=getattr(torch, group.dtype.value), device=device)
        noisy = pool[..., :NOISE_CELLS, :]
        noisy.copy_(torch.randn(noisy.shape, generator=generator))
        pools.append(pool)
    return SampleStep(
        input_ids=torch.randint(vocab_size, (batch, query_len), generator=generator, dtype=torch.int32).to(device),
        position_ids=(start + torch.arange(query_len, dtype=torch.int32)).repeat(batch, 1).to(device),
        write_start=torch.full((batch,), start, dtype=torch.int32, device=device),
        last_index=torch.full((batch,), query_len - 1, dtype=torch.int32, device=device),
        block_table=pages.to(torch.int32).view(batch, pages_per_row).to(device),
        pools=tuple(pools),
    )


def gather_rows(cache: KVCacheSpec, pool: Tensor, block_table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The first `length` keys and values of every row, `[batch, kv_heads, length, head_dim]` each: copies."""
    pages = pool.movedim(cache.layout.page_dim, 0)[..., :length, :]
    rows = pages[block_table.long()].movedim(2, 0).transpose(2, 3).flatten(3, 4)[..., :length, :]
    return rows[0], rows[1]


def scatter_rows(cache: KVCacheSpec, pool: Tensor, block_table: Tensor, keys: Tensor, values: Tensor) -> None:
    """The first entries of every row, of `keys` and `values` `[batch, kv_heads, length, head_dim]`, into the pool's cells."""
    ordinals = torch.arange(keys.shape[2], device=pool.device)
    page_BT, cell_T = block_table.long()[:, ordinals // cache.page_size], ordinals % cache.page_size
    pages = pool.movedim(cache.layout.page_dim, 0)
    pages[page_BT, :, :, cell_T] = torch.stack([keys, values], dim=1).movedim(3, 1)


def written_cells(cache: KVCacheSpec, step: SampleStep, pool: Tensor) -> Tensor:
    """Bool mask of `pool`'s shape: the cells the step may change."""
    mask = torch.zeros(pool.shape, dtype=torch.bool, device=pool.device)
    pages = mask.movedim(cache.layout.page_dim, 0)
    for row, start in enumerate(step.write_start.tolist()):
        for ordinal in range(start, start + step.input_ids.shape[1]):
            pages[step.block_table[row, ordinal // cache.page_size], :, :, ordinal % cache.page_size] = True
    return mask


LEAST_COSINE = {torch.float32: 0.9999, torch.bfloat16: 0.99}
"""Between the logits of two ways to compute a step, by the element type they compute in."""


def logits_differ(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> str:
    """How two logits tensors of one step differ beyond what arithmetic in `dtype` explains; empty if they do not."""
    if not torch.isfinite(got).all():
        return "logits are not finite"
    cosine = float(torch.cosine_similarity(got, wanted, dim=-1).min())
    least = LEAST_COSINE[dtype]
    return "" if cosine >= least else f"logits have cosine {cosine:.5f} to the reference, at least {least} is expected"

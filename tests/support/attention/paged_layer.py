"""Two layers of projections around `quire::paged_attend`, for tests of export and of AOTInductor packages."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from shared.kv_spec import Layout

HEADS, KV_HEADS, DIM, PAGE_SIZE, WIDTH = 4, 2, 8, 16, 32


class PagedLayers(nn.Module):
    """hidden `[B, n, WIDTH]`, one pool a layer, block table, start -> hidden `[B, n, WIDTH]`."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.page_dim = layout.page_dim
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * DIM)
        self.out = nn.Linear(HEADS * DIM, WIDTH)
        self.sinks = nn.Parameter(torch.linspace(-1, 1, HEADS))

    def forward(self, hidden: Tensor, first: Tensor, second: Tensor, block_table: Tensor, start: Tensor) -> Tensor:
        batch, count, _ = hidden.shape
        for pool, window in ((first, None), (second, 9)):
            sizes = (HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM)
            q, k, v = (rows.view(batch, count, -1, DIM).transpose(1, 2) for rows in self.qkv(hidden).split(sizes, dim=-1))
            seen = torch.ops.quire.paged_attend(
                q * 1.5, k, v, pool, block_table, start, self.page_dim, DIM**-0.5, window, None, self.sinks
            )
            hidden = hidden + self.out(seen.transpose(1, 2).reshape(batch, count, HEADS * DIM))
        return hidden


def inputs(layout: Layout, batch: int, count: int, num_pages: int, starts: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Example inputs of `PagedLayers`: three pages a row (one slot of three pages' size in the linear layout)."""
    if layout is Layout.PAGED:
        shape = (num_pages, 2, KV_HEADS, PAGE_SIZE, DIM)
        table = torch.arange(1, 1 + 3 * batch).view(batch, 3)
    else:
        shape = (2, num_pages, KV_HEADS, 3 * PAGE_SIZE, DIM)
        table = torch.arange(1, 1 + batch).view(batch, 1)
    pools = (torch.randn(shape), torch.randn(shape))
    return (torch.randn(batch, count, WIDTH), *pools, table.to(torch.int32), torch.tensor(starts, dtype=torch.int32))


def export(layout: Layout) -> ExportedProgram:
    """`PagedLayers`, exported with every size dynamic from 1 and decomposed; seeded."""
    torch.manual_seed(0)
    layers = PagedLayers(layout).eval()
    batch, count, pages = Dim("batch", min=1, max=8), Dim("count", min=1, max=40), Dim("pages", min=2, max=2**24)
    pool = {layout.page_dim: pages}
    table = {0: batch, 1: Dim("width", min=1, max=64)} if layout is Layout.PAGED else {0: batch}
    shapes = ({0: batch, 1: count}, pool, pool, table, {0: batch})
    with torch.no_grad():
        program = torch.export.export(layers, inputs(layout, 3, 5, 12, (3, 9, 0)), dynamic_shapes=shapes, strict=False)
        return program.run_decompositions()

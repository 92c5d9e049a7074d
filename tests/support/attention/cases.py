"""Inputs of the attention ops for tests: random rows, shuffled page tables, and pools that are NaN wherever no query may look."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shared.kernels.attention import reference

CAPACITY = 96
"""Cells of a row unless a case says otherwise."""


@dataclass(frozen=True)
class Case:
    """One shape. `starts` has one entry a row; `padding` elements lie unused behind every page of the pool."""

    dtype: torch.dtype = torch.float32
    kv_heads: int = 2
    group: int = 2
    count: int = 1
    dim: int = 64
    page_size: int = 16
    page_dim: int = 0
    starts: tuple[int, ...] = (0, 37, 90)
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    padding: int = 0
    capacity: int = CAPACITY

    @property
    def batch(self) -> int:
        return len(self.starts)

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    def fitted(self) -> Case:
        """With starts clipped so that every row has room for its new tokens."""
        return replace(self, starts=tuple(min(start, self.capacity - self.count) for start in self.starts))

    def __str__(self) -> str:
        parts = [str(self.dtype).removeprefix("torch."), f"n{self.count}", f"{self.heads}/{self.kv_heads}x{self.dim}"]
        parts += [f"pages{self.page_size}", "paged" if self.page_dim == 0 else "linear"]
        parts += [f"w{self.window}"] * (self.window is not None) + [f"cap{self.softcap}"] * (self.softcap is not None)
        return "-".join(parts + ["sinks"] * self.sinks)


@dataclass(frozen=True)
class Inputs:
    """Arguments of `quire::paged_attend` for a case, and the same history as contiguous caches for `quire::attend`."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    pool: Tensor
    table: Tensor
    start: Tensor
    sinks: Tensor | None
    storage: Tensor = field(repr=False)
    """Everything the pool lies in, its padding included."""

    @property
    def options(self) -> tuple[float, int | None, float | None, Tensor | None]:
        return self.case.dim**-0.5, self.case.window, self.case.softcap, self.sinks

    def paged_arguments(self) -> tuple[object, ...]:
        return (self.q, self.k, self.v, self.pool, self.table, self.start, self.case.page_dim, *self.options)

    def copy(self) -> Inputs:
        """The same inputs over a pool of their own."""
        storage = self.storage.clone()
        pool = storage.as_strided(self.pool.shape, self.pool.stride(), self.pool.storage_offset())
        return replace(self, storage=storage, pool=pool)

    def on(self, device: torch.device) -> Inputs:
        """A copy on another device, at the same strides."""
        storage = self.storage.to(device)
        pool = storage.as_strided(self.pool.shape, self.pool.stride(), self.pool.storage_offset())
        moved = {name: getattr(self, name).to(device) for name in ("q", "k", "v", "table", "start")}
        return replace(self, storage=storage, pool=pool, sinks=None if self.sinks is None else self.sinks.to(device), **moved)

    def caches(self) -> tuple[Tensor, Tensor]:
        """K and V `[B, K, capacity, D]` as the rows of the pool read after the new ones were written, at odd strides."""
        case, pages = self.case, reference.by_page(self.pool, self.case.page_dim)
        keys, values = (pages[self.table.long(), kind].transpose(1, 2).flatten(2, 3)[:, :, : case.capacity] for kind in (0, 1))
        return keys, values.transpose(1, 2).contiguous().transpose(1, 2)


def make(case: Case, seed: int = 0) -> Inputs:
    """Random inputs. Live cells hold values; all others, unmapped pages and the dump page too, hold NaN (BR-020, BR-063).

    Table entries past a row's last cell name the page of another row.
    """
    case = case.fitted()
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(case.dtype)

    width = -(-case.capacity // case.page_size)
    num_pages = case.batch * width + 2
    table = (torch.randperm(num_pages - 1, generator=random)[: case.batch * width] + 1).view(case.batch, width).to(torch.int32)

    page_shape = (case.kv_heads, case.page_size, case.dim)
    row = case.kv_heads * case.page_size * case.dim + case.padding
    outer = (2 * row, row) if case.page_dim == 0 else (row, num_pages * row)
    storage = torch.full((2 * num_pages * row,), torch.nan, dtype=case.dtype)
    strides = (*outer, case.page_size * case.dim, case.dim, 1)
    pages = storage.as_strided((num_pages, 2, *page_shape), strides)
    for b, start in enumerate(case.starts):
        for cell in range(start):
            page = int(table[b, cell // case.page_size])
            pages[page, :, :, cell % case.page_size] = normal(2, case.kv_heads, case.dim)
    for b, start in enumerate(case.starts):
        used = -(-(start + case.count) // case.page_size)
        table[b, used:] = table[(b + 1) % case.batch, 0]

    return Inputs(
        case=case,
        q=normal(case.batch, case.count, case.heads, case.dim).transpose(1, 2),
        k=normal(case.batch, case.kv_heads, case.count, case.dim),
        v=normal(case.batch, case.count, case.kv_heads, case.dim).transpose(1, 2),
        pool=pages.transpose(0, 1) if case.page_dim == 1 else pages,
        table=table,
        start=torch.tensor(case.starts, dtype=torch.int32),
        sinks=torch.randn(case.heads, generator=random) if case.sinks else None,
        storage=storage,
    )


TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 5e-6},
    torch.bfloat16: {"rtol": 2**-7, "atol": 2**-8},
    torch.float16: {"rtol": 2**-10, "atol": 2**-10},
}
"""Of implementations that round to the dtype once, at the end."""


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bytes, which compare equal where NaN meets NaN."""
    return tensor.contiguous().view(torch.uint8)


HEAD_DIMS = (32, 64, 80, 96, 128, 256)
OPTIONS = (
    {},
    {"window": 1},
    {"window": 20},
    {"window": 500},
    {"softcap": 3.0},
    {"sinks": True},
    {"window": 33, "softcap": 5.0, "sinks": True},
)


def catalogue(dims: tuple[int, ...] = HEAD_DIMS, counts: tuple[int, ...] = (1, 3, 4, 5, 40)) -> list[Case]:
    """Every dtype with every head size, page size, layout, number of new tokens, group size and option at least once each."""
    cases = []
    for dtype in TOLERANCE:
        for index, dim in enumerate(dims):
            cases.append(
                Case(dtype, dim=dim, page_size=(1, 16, 32, 64)[index % 4], count=counts[index % len(counts)], group=1 + index)
            )
        for index, count in enumerate(counts):
            linear = {"page_dim": 1, "page_size": CAPACITY} if index % 2 else {"page_size": 32}
            cases.append(Case(dtype, count=count, group=3, kv_heads=3, padding=64, **linear))
        for index, options in enumerate(OPTIONS):
            for count in (counts[index % len(counts)], counts[-1 - index % len(counts)]):
                cases.append(Case(dtype, count=count, dim=dims[index % len(dims)], group=1 + index % 4, **options))
    return [case.fitted() for case in cases]

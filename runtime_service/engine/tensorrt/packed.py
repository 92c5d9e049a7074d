"""A step's writes to a paged pool as packed rows: which new row goes to which pool row, computed on the host.

page_size 4, row 0 writes ordinals 3, 4, 5 over pages [9, 2]; keys are new rows 0..3, values 3..6
pool rows   4 (keys of page 2)  5 (values of page 2)  18 (keys of page 9)  19 (values of page 9)
take        rows 1, 2           rows 4, 5             row 0                row 3
from cell   0                   0                     3                    3
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.bindings import BLOCK_TABLE
from shared.errors import FieldOutOfRange

DUMP_PAGE = 0


@dataclass(frozen=True, slots=True)
class PackedWrite:
    """The inputs of the same names in shared/bindings.py, int32 on the host."""

    order: Tensor
    ends: Tensor
    offsets: Tensor


def pack_write(block_table: Tensor, write_start: Tensor, query_len: int, page_size: int, num_pages: int) -> PackedWrite:
    """The writes of a step whose inputs have been checked (bindings.py). Tokens bound for the dump page are not written.

    FieldOutOfRange when two rows write one page: a pool row takes one run.
    """
    batch = block_table.shape[0]
    cells = write_start.long()[:, None] + torch.arange(query_len)
    pages = block_table.long().gather(1, cells // page_size).reshape(-1)
    rows = torch.arange(batch).repeat_interleave(query_len)
    real = torch.nonzero(pages != DUMP_PAGE).squeeze(1)
    pages, rows = pages[real], rows[real]
    counts = torch.bincount(pages, minlength=num_pages)
    sorted_by_page = torch.argsort(pages, stable=True)
    tokens, pages, rows = real[sorted_by_page], pages[sorted_by_page], rows[sorted_by_page]
    if shared := pages[1:][(pages[1:] == pages[:-1]) & (rows[1:] != rows[:-1])].tolist():
        raise FieldOutOfRange(f"page {shared[0]} would be written by two rows; every row needs pages of its own", field=BLOCK_TABLE)
    before = counts.cumsum(0) - counts
    rank = torch.arange(len(tokens)) - before[pages]
    order = torch.empty(2 * len(tokens), dtype=torch.int64)
    order[2 * before[pages] + rank] = tokens
    order[2 * before[pages] + counts[pages] + rank] = batch * query_len + tokens
    ends = torch.zeros(2 * num_pages + 1, dtype=torch.int64)
    ends[1:] = counts.repeat_interleave(2).cumsum(0)
    offsets = torch.zeros(num_pages, dtype=torch.int64)
    first = tokens[rank == 0]
    offsets[pages[rank == 0]] = cells.reshape(-1)[first] % page_size
    return PackedWrite(order.int(), ends.int(), offsets.repeat_interleave(2).int())

"""A step's writes to a paged pool as packed rows: which new row goes to which pool row, computed on the host.

page_size 4, row 0 writes ordinals 3, 4, 5 over pages [9, 2]; keys are new rows 0..3, values 3..6
pool rows   4 (keys of page 2)  5 (values of page 2)  18 (keys of page 9)  19 (values of page 9)
take        rows 1, 2           rows 4, 5             row 0                row 3
from cell   0                   0                     3                    3
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from runtime_service.kv.allocator import DUMP_PAGE
from shared.bindings import BLOCK_TABLE
from shared.errors import FieldOutOfRange


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
    # In numpy: a decode step has few tokens, and a call of torch costs several times one of numpy.
    cells = write_start.numpy()[:, None] + np.arange(query_len, dtype=np.int32)
    pages = np.take_along_axis(block_table.numpy(), cells // page_size, axis=1).reshape(-1)
    real = np.flatnonzero(pages != DUMP_PAGE)
    tokens = real[np.argsort(pages[real], kind="stable")]
    pages, rows = pages[tokens], tokens // query_len
    if shared := pages[1:][(pages[1:] == pages[:-1]) & (rows[1:] != rows[:-1])].tolist():
        raise FieldOutOfRange(f"page {shared[0]} would be written by two rows; every row needs pages of its own", field=BLOCK_TABLE)
    first = np.flatnonzero(np.diff(pages, prepend=DUMP_PAGE))
    counts = np.diff(first, append=len(tokens))
    # A page's keys come before its values: both behind twice the tokens of the pages before it.
    key = np.arange(len(tokens)) + np.repeat(first, counts)
    order = np.empty(2 * len(tokens), dtype=np.int32)
    order[key] = tokens
    order[key + np.repeat(counts, counts)] = cells.size + tokens
    written = pages[first]
    ends = np.zeros(2 * num_pages + 1, dtype=np.int32)
    ends[2 * written + 1] = ends[2 * written + 2] = counts
    np.cumsum(ends, out=ends)
    offsets = np.zeros(2 * num_pages, dtype=np.int32)
    offsets[2 * written] = offsets[2 * written + 1] = cells.reshape(-1)[tokens[first]] % page_size
    return PackedWrite(*map(torch.from_numpy, (order, ends, offsets)))

"""Packed rows put every new key and value where the block table says, as KVCacheUpdate is defined."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from runtime_service.engine.tensorrt.packed import PackedWrite, pack_write
from shared.errors import FieldOutOfRange

PAGE_SIZE = 4


def pack(table: list[list[int]], starts: list[int], query_len: int, num_pages: int) -> PackedWrite:
    pages, firsts = (torch.tensor(values, dtype=torch.int32) for values in (table, starts))
    return pack_write(pages, firsts, query_len, PAGE_SIZE, num_pages)


def written(write: PackedWrite, num_pages: int) -> dict[tuple[int, int], int]:
    """(pool row, cell) -> number of the new row there, by the layer's definition."""
    cells = {}
    for row in range(2 * num_pages):
        begin, end = write.ends[row : row + 2].tolist()
        for step in range(end - begin):
            cells[row, int(write.offsets[row]) + step] = int(write.order[begin + step])
    return cells


def test_the_example_of_the_module() -> None:
    write = pack([[9, 2]], [3], 3, num_pages=10)
    assert write.order.tolist() == [1, 2, 4, 5, 0, 3]
    assert written(write, 10) == {(4, 0): 1, (4, 1): 2, (5, 0): 4, (5, 1): 5, (18, 3): 0, (19, 3): 3}


def test_tokens_for_the_dump_page_are_left_out() -> None:
    """A padded row, and the padded end of a row whose next page is not there."""
    write = pack([[0, 0], [3, 0]], [0, 2], 4, num_pages=4)
    assert written(write, 4) == {(6, 2): 4, (6, 3): 5, (7, 2): 12, (7, 3): 13}


def test_a_step_of_padding_writes_nothing() -> None:
    write = pack([[0]], [0], 2, num_pages=3)
    assert (write.order.numel(), write.ends.tolist()) == (0, [0] * 7)


def test_two_rows_on_one_page_are_refused() -> None:
    with pytest.raises(FieldOutOfRange, match="page 5 would be written by two rows"):
        pack([[5], [5]], [0, 2], 1, num_pages=6)


@st.composite
def steps(draw: st.DrawFn) -> tuple[Tensor, Tensor, int, int]:
    batch, width, num_pages = draw(st.integers(1, 4)), draw(st.integers(1, 4)), 20
    query_len = draw(st.integers(1, width * PAGE_SIZE))
    starts = draw(st.lists(st.integers(0, width * PAGE_SIZE - query_len), min_size=batch, max_size=batch))
    pages = draw(st.permutations(range(1, num_pages)))[: batch * width]
    table = torch.tensor(pages, dtype=torch.int32).view(batch, width)
    hidden = torch.tensor(draw(st.lists(st.booleans(), min_size=batch * width, max_size=batch * width))).view(batch, width)
    return table.masked_fill(hidden, 0), torch.tensor(starts, dtype=torch.int32), query_len, num_pages


@given(steps())
def test_every_row_goes_to_its_cell_and_nowhere_else(step: tuple[Tensor, Tensor, int, int]) -> None:
    table, starts, query_len, num_pages = step
    batch = len(starts)
    wanted = {}
    for row in range(batch):
        for i in range(query_len):
            ordinal = int(starts[row]) + i
            page, cell = int(table[row, ordinal // PAGE_SIZE]), ordinal % PAGE_SIZE
            if page:
                token = row * query_len + i
                wanted |= {(2 * page, cell): token, (2 * page + 1, cell): batch * query_len + token}
    assert written(pack_write(table, starts, query_len, PAGE_SIZE, num_pages), num_pages) == wanted

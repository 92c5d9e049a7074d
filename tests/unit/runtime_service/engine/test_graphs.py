"""What a CUDA graph's fixed memory asks for, without a GPU: buckets and where the inputs of a step lie."""

from __future__ import annotations

import pytest
import torch

from runtime_service.engine.engine import EngineInputs
from runtime_service.engine.graphs import batch_buckets, decode_layout


@pytest.mark.parametrize(
    ("largest", "buckets"),
    [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (12, (1, 2, 4, 8, 12)), (32, (1, 2, 4, 8, 16, 24, 32))],
)
def test_buckets_end_at_the_largest_batch(largest: int, buckets: tuple[int, ...]) -> None:
    assert batch_buckets(largest) == buckets


def inputs(batch: int, width: int) -> EngineInputs:
    ids, positions, start, last = (100 * kind + torch.arange(batch, dtype=torch.int32) for kind in range(1, 5))
    table = torch.arange(batch * width, dtype=torch.int32).view(batch, width) + 1000
    return EngineInputs("decode", ids[:, None], positions[:, None], start, last, table)


def test_a_step_of_three_rows_is_padded_to_its_bucket_with_the_dump_page() -> None:
    layout, step = decode_layout(4, 6), inputs(3, 5)
    buffer = torch.full((layout.size,), 7, dtype=torch.int32)
    layout.bring({name: getattr(step, name) for name in layout.places}, buffer)
    for name in layout.places:
        view, given = layout.view(buffer, name), getattr(step, name)
        assert torch.equal(view[tuple(slice(size) for size in given.shape)], given)
        assert view[3:].eq(0).all()
    table = layout.view(buffer, "block_table")
    assert table.shape == (4, 6)
    assert table[:, 5].eq(0).all()

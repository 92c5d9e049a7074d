"""What a CUDA graph's fixed memory asks for, without a GPU: buckets and where the inputs of a step lie."""

from __future__ import annotations

import itertools

import pytest
import torch

from runtime_service.engine.engine import EngineInputs
from runtime_service.engine.graphs import InputLayout, batch_buckets


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
    layout, step = InputLayout.of(4, 6), inputs(3, 5)
    views = layout.views(layout.packed(step))
    for name, view in views.items():
        given = getattr(step, name)
        assert torch.equal(view[tuple(slice(size) for size in given.shape)], given)
        assert view[3:].eq(0).all()
    assert views["block_table"].shape == (4, 6)
    assert views["block_table"][:, 5].eq(0).all()


def test_inputs_start_where_vectors_of_16_bytes_may() -> None:
    layout = InputLayout.of(5, 33)
    assert all(offset % 4 == 0 for offset, _ in layout.places.values())
    ends = sorted((offset, offset + torch.Size(shape).numel()) for offset, shape in layout.places.values())
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends))
    assert ends[-1][1] <= layout.size

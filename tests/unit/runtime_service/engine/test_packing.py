"""Inputs side by side: each at a place of its own, where a device may read it in vectors."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime_service.engine.packing import InputLayout

shapes = st.lists(st.lists(st.integers(1, 70), min_size=1, max_size=2).map(tuple), min_size=1, max_size=6)


@given(shapes)
def test_inputs_do_not_overlap_and_start_at_multiples_of_256_bytes(sizes: list[tuple[int, ...]]) -> None:
    layout = InputLayout.of({str(index): shape for index, shape in enumerate(sizes)})
    assert all(offset % 64 == 0 for offset, _ in layout.places.values())
    ends = sorted((offset, offset + math.prod(shape)) for offset, shape in layout.places.values())
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ends))
    assert ends[-1][1] <= layout.size


@given(shapes)
def test_what_is_brought_is_found_at_its_place(sizes: list[tuple[int, ...]]) -> None:
    named = {str(index): shape for index, shape in enumerate(sizes)}
    layout = InputLayout.of(named)
    values = {name: torch.randint(1, 1000, shape, dtype=torch.int32) for name, shape in named.items()}
    buffer = torch.full((layout.size + 3,), -1, dtype=torch.int32)
    layout.bring(values, buffer)
    assert all(torch.equal(layout.view(buffer, name), value) for name, value in values.items())
    assert buffer[layout.size :].eq(-1).all()


def test_a_value_on_a_device_is_left_out_of_what_the_host_packs() -> None:
    """It is copied from where it lies; the host has not seen it."""
    layout = InputLayout.of({"ids": (2, 1), "starts": (2,)})
    values = {"ids": torch.empty(2, 1, dtype=torch.int32, device="meta"), "starts": torch.tensor([5, 6], dtype=torch.int32)}
    packed = layout.packed(values)
    assert layout.view(packed, "ids").tolist() == [[0], [0]]
    assert layout.view(packed, "starts").tolist() == [5, 6]

"""The specification against a scalar loop that shares nothing with it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from shared.kernels.attention import reference
from tests.support.attention.cases import Case, Inputs, make

SMALL = {"kv_heads": 2, "dim": 4, "page_size": 4, "capacity": 24, "starts": (0, 5, 19)}
CASES = [
    Case(group=2, count=1, **SMALL),
    Case(group=1, count=3, **SMALL),
    Case(group=3, count=5, page_dim=1, **(SMALL | {"page_size": 24})),
    Case(group=2, count=2, padding=8, **(SMALL | {"page_size": 1})),
    Case(group=2, count=4, window=1, **SMALL),
    Case(group=2, count=4, window=6, sinks=True, **SMALL),
    Case(group=2, count=3, softcap=0.7, **SMALL),
    Case(group=2, count=3, window=5, softcap=0.7, sinks=True, **SMALL),
]


def loop_attend(inputs: Inputs, history: list[list[tuple[np.ndarray, np.ndarray]]]) -> np.ndarray:
    """Scalar attention; `history[b][cell]` is (K, V) `[kv_heads, dim]` of every cell of row b, the new ones included."""
    case, q = inputs.case, inputs.q.double().numpy()
    out = np.zeros(q.shape)
    for b, h, i in np.ndindex(*q.shape[:3]):
        own, kv_head = case.starts[b] + i, h // case.group
        logits, values = [], []
        for cell in range(len(history[b])):
            if cell > own or (case.window is not None and own - cell >= case.window):
                continue
            score = case.dim**-0.5 * sum(float(x) * float(y) for x, y in zip(q[b, h, i], history[b][cell][0][kv_head], strict=True))
            logits.append(case.softcap * math.tanh(score / case.softcap) if case.softcap else score)
            values.append(history[b][cell][1][kv_head])
        weights = [math.exp(logit) for logit in logits]
        total = sum(weights) + (math.exp(float(inputs.sinks[h])) if inputs.sinks is not None else 0.0)
        out[b, h, i] = sum(weight / total * value for weight, value in zip(weights, values, strict=True))
    return out


def cells_of(inputs: Inputs) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """What each row's cells hold once its new rows are written, read one by one."""
    case, pages = inputs.case, reference.by_page(inputs.pool, inputs.case.page_dim)
    rows = []
    for b, start in enumerate(case.starts):
        row = []
        for cell in range(start):
            page = pages[int(inputs.table[b, cell // case.page_size])]
            row.append(tuple(page[kind, :, cell % case.page_size].double().numpy().copy() for kind in (0, 1)))
        for i in range(case.count):
            row.append((inputs.k[b, :, i].double().numpy(), inputs.v[b, :, i].double().numpy()))
        rows.append(row)
    return rows


@pytest.mark.parametrize("case", CASES, ids=str)
def test_paged_attend_equals_the_scalar_loop(case: Case) -> None:
    inputs = make(case)
    expected = loop_attend(inputs, cells_of(inputs))
    out = reference.paged_attend(*inputs.paged_arguments())
    np.testing.assert_allclose(out.double().numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attend_equals_the_scalar_loop(case: Case) -> None:
    inputs = make(case)
    expected = loop_attend(inputs, cells_of(inputs))
    reference.paged_attend(*inputs.paged_arguments())
    out = reference.attend(inputs.q, *inputs.caches(), inputs.start, *inputs.options)
    np.testing.assert_allclose(out.double().numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_paged_attend_writes_the_new_rows_and_nothing_else(case: Case) -> None:
    """BR-065 too: the padding of a pool whose pages lie apart keeps its bytes."""
    inputs = make(case)
    before = inputs.copy()
    reference.paged_attend(*inputs.paged_arguments())
    pages = reference.by_page(before.pool, case.page_dim)
    for b, start in enumerate(case.starts):
        for i in range(case.count):
            page = int(before.table[b, (start + i) // case.page_size])
            pages[page, 0, :, (start + i) % case.page_size] = before.k[b, :, i]
            pages[page, 1, :, (start + i) % case.page_size] = before.v[b, :, i]
    assert torch.equal(inputs.storage.view(torch.int32), before.storage.view(torch.int32))


@pytest.mark.parametrize(
    ("start", "count", "window", "cells"),
    [
        (0, 1, None, (0, 1)),
        (10, 3, None, (0, 13)),
        (10, 1, 4, (7, 11)),
        (10, 3, 4, (7, 13)),
        (2, 1, 4, (0, 3)),
        (0, 5, 1, (0, 5)),
    ],
)
def test_visible_cells(start: int, count: int, window: int | None, cells: tuple[int, int]) -> None:
    assert reference.visible_cells(start, count, window) == cells


def test_output_is_token_major() -> None:
    q = torch.empty(2, 6, 3, 8)
    out = reference.empty_output(q)
    assert out.shape == q.shape
    assert out.transpose(1, 2).is_contiguous()

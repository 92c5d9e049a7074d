"""The checked wrappers: what they pass on, and the words with which they refuse."""

from __future__ import annotations

import re

import pytest
import torch

from shared.kernels.attention import paged
from tests.support.attention.cases import Case, bits, make
from tests.support.attention.refusals import REFUSED

CASE = Case(count=2, window=30, softcap=4.0, sinks=True)


def test_paged_attend_is_the_op() -> None:
    inputs, twin = make(CASE), make(CASE)
    scale, window, softcap, sinks = inputs.options
    out = paged.paged_attend(
        inputs.q, inputs.k, inputs.v, inputs.pool, inputs.table, inputs.start,
        page_dim=0, scale=scale, window=window, softcap=softcap, sinks=sinks,
    )  # fmt: skip
    assert torch.equal(out, torch.ops.quire.paged_attend(*twin.paged_arguments()))
    assert torch.equal(bits(inputs.storage), bits(twin.storage))


def test_attend_is_the_op() -> None:
    inputs = make(CASE)
    torch.ops.quire.paged_attend(*inputs.paged_arguments())
    scale, window, softcap, sinks = inputs.options
    caches = inputs.caches()
    out = paged.attend(inputs.q, *caches, inputs.start, scale=scale, window=window, softcap=softcap, sinks=sinks)
    assert torch.equal(out, torch.ops.quire.attend(inputs.q, *caches, inputs.start, *inputs.options))


@pytest.mark.parametrize("message", REFUSED)
def test_refuses_by_name_with_the_pool_untouched(message: str) -> None:
    inputs = make(Case(count=2))
    before = inputs.storage.clone()
    arguments = REFUSED[message](inputs)
    positional = [arguments.pop(name) for name in ("q", "k", "v", "pool", "block_table", "start")]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}") as raised:
        paged.paged_attend(*positional, **arguments)
    assert ", got " in str(raised.value)
    assert torch.equal(bits(inputs.storage), bits(before))


def test_attend_refuses_by_name() -> None:
    inputs = make(Case(count=2))
    keys, values = inputs.caches()
    for arguments, message in [
        ((inputs.q, keys[0], values, inputs.start), "k_cache: expected [batch, kv_heads, cells, head_dim], got (2, 96, 64)"),
        ((inputs.q, keys, values[:, :, :5], inputs.start), "v_cache: expected (3, 2, 96, 64), got (3, 2, 5, 64)"),
        ((inputs.q, keys, values.half(), inputs.start), "v_cache: expected torch.float32 like q, got torch.float16"),
        ((inputs.q, keys.mT.contiguous().mT, values, inputs.start), "k_cache: expected head_dim of stride 1, got stride 96"),
        ((inputs.q, keys, values, inputs.start + 10), "start[2]: expected 0..94 (room for 2 new tokens in 96 cells), got 100"),
    ]:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            paged.attend(*arguments, scale=1.0)


def test_stale_table_entries_may_name_no_page_at_all() -> None:
    """BR-063: entries past a row's last cell are neither read nor judged."""
    inputs, twin = make(CASE), make(CASE)
    inputs.table[0, 1:] = 2**31 - 1
    scale, window, softcap, sinks = inputs.options
    out = paged.paged_attend(
        inputs.q, inputs.k, inputs.v, inputs.pool, inputs.table, inputs.start,
        page_dim=0, scale=scale, window=window, softcap=softcap, sinks=sinks,
    )  # fmt: skip
    assert torch.equal(out, torch.ops.quire.paged_attend(*twin.paged_arguments()))

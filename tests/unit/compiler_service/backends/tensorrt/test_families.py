"""Some rows of the table of families (`make families` prints all): one for each kind of trouble."""

from __future__ import annotations

import importlib.util

import pytest

from tests.bench.families import Fate, table

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch_tensorrt") is None or importlib.util.find_spec("tensorrt_rtx") is None,
    reason="torch_tensorrt and tensorrt_rtx are not installed",
)
WRITES = {"gpt2:stock": 4, "gemma3_text:stock": 6, "gemma3_text:ours": 6, "diffllama:stock": 4}
"""Cache sizes that reach the network as unknown; windows, in masks of the model's own and in ours; two attentions to a query."""


@pytest.fixture(scope="module")
def fates() -> dict[str, Fate]:
    return {f"{family}:{how}": fate for family, how, fate in table(list(WRITES))}


@pytest.mark.parametrize("item", WRITES)
def test_every_write_is_proven_aliased_and_right(fates: dict[str, Fate], item: str) -> None:
    count = WRITES[item]
    assert fates[item] == Fate(exported=True, proven=count, writes=count, right=True, engines=1, fallbacks=0, aliased=count)


def test_an_engine_that_says_something_else_would_be_noticed() -> None:
    assert Fate(exported=True, engines=1, right=False).wrongly_accepted
    assert not Fate(exported=True, engines=0, right=False).wrongly_accepted

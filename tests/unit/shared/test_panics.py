"""What a Rust library raises is seen as an error, panics included; what is no error passes."""

from __future__ import annotations

import asyncio

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from shared.errors import FieldOutOfRange
from shared.panics import translated


def test_a_panic_becomes_the_callers_error_with_its_cause() -> None:
    """A real one: a pattern that backtracks for ever is given up by a panic, which no `except Exception` sees."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    with pytest.raises(FieldOutOfRange, match="retry-limit") as caught, translated(lambda error: FieldOutOfRange(str(error))):
        tokenizer.encode("a" * 40 + "b")
    assert not isinstance(caught.value.__cause__, Exception)


@pytest.mark.parametrize("raised", [asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit])
def test_what_is_no_error_passes(raised: type[BaseException]) -> None:
    with pytest.raises(raised), translated(lambda error: FieldOutOfRange(str(error))):
        raise raised

"""Tokenizers: token ids a source declares, and tokenizer.json of a checkpoint or made from a GGUF file's vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer

from shared.errors import SourceInvalid
from shared.panics import translated

MAX_EOS_IDS = 64


def token_ids(bos: Any, eos: Any, vocab_size: int) -> tuple[int | None, tuple[int, ...]]:
    """(bos, eos ids) as declared: a number, a list of numbers or nothing. SourceInvalid for an id outside the vocabulary."""
    ends = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if len(ends) > MAX_EOS_IDS:
        raise SourceInvalid(f"at most {MAX_EOS_IDS} eos_token_id values are taken; the model declares {len(ends)}")
    for name, value in [("bos_token_id", bos), *(("eos_token_id", end) for end in ends)]:
        if value is not None and not (type(value) is int and 0 <= value < vocab_size):
            raise SourceInvalid(f"{name} must be in 0..{vocab_size}; got {str(value)[:40]!r}")
    return bos, tuple(sorted(set(ends)))


def read_tokenizer(path: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer in `path`. SourceInvalid when it cannot be read or produces ids the model has no embedding for."""
    with translated(lambda error: SourceInvalid(f"{path.name} is not a tokenizer: {str(error)[:200]}")):
        tokenizer = Tokenizer.from_file(str(path))
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= vocab_size:
        raise SourceInvalid(f"config and tokenizer disagree: vocab_size is {vocab_size}, the tokenizer has an id {largest}")
    return tokenizer


def tokenizer_of_gguf(path: Path) -> Tokenizer:
    """The tokenizer a checked GGUF file describes. SourceInvalid where its vocabulary does not make one."""
    # What a vocabulary that is none makes the libraries raise is a plain Exception, where it is no panic.
    with translated(lambda error: SourceInvalid(f"no tokenizer can be made from {path.name}: {str(error)[:200]}")):
        fast = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    tokenizer: Tokenizer = fast.backend_tokenizer
    return tokenizer

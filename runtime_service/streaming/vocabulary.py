"""Tokens as byte strings: the text of a sequence is the UTF-8 reading of its tokens' bytes, one after another.

That is what the decoders of language models compute, in three families:

    byte-level       each character of a token stands for one byte (GPT-2, Llama 3, Qwen, SmolLM2)
    byte-fallback    tokens are text, those named <0x00> .. <0xFF> are single bytes (Llama 2, Gemma)
    text             tokens are text; a space is written with another character, or between tokens

The first token of a text may lose its leading space, hence `first`. Decoders that look at more of the text (WordPiece's clean-up,
CTC) cannot be streamed without taking back what was shown, and are refused.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer

from shared.errors import InternalError, UnsupportedModel
from shared.panics import translated

_TEXT_DECODERS = {"ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 characters are themselves, the other bytes take 256 and up in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


class Vocabulary:
    """The tokens of one tokenizer; made once an engine, shared by its sequences on the serving loop's thread.

    `size` is one more than the largest id: the sampler's bound. Ids below it without a token, and special tokens, have no text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """UnsupportedModel if the tokenizer's decoder cannot be streamed."""
        self._tokenizer = tokenizer
        self._special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        ids = tokenizer.get_vocab(with_added_tokens=True).values()
        self.size = max(ids, default=-1) + 1
        kinds = {step["type"] for step in _decoder_steps(tokenizer)}
        self._byte_of_character = _byte_of_character() if "ByteLevel" in kinds else None
        self._has_byte_tokens = "ByteFallback" in kinds
        self._pieces: dict[tuple[int, bool], bytes | None] = {}
        self._anchor = self._find_anchor()

    def piece(self, token_id: int, *, first: bool) -> bytes | None:
        """Bytes of a token; None if no text comes of its id (special tokens, holes).

        `first` if no token with text came before it. InternalError if the id is outside `0..size`, or the tokenizer fails over it.
        """
        key = (token_id, first)
        if key not in self._pieces:
            if not 0 <= token_id < self.size:
                raise InternalError(f"a token id of this vocabulary is 0 to {self.size - 1}; the model gave {token_id}")
            self._pieces[key] = self._compute(token_id, first)
        return self._pieces[key]

    def _compute(self, token_id: int, first: bool) -> bytes | None:
        token = None if token_id in self._special else self._tokenizer.id_to_token(token_id)
        if token is None:
            return None
        if self._byte_of_character is not None:
            values = [self._byte_of_character.get(character) for character in token]
            known = [value for value in values if value is not None]
            return bytes(known) if len(known) == len(values) else token.encode()  # an added token may be plain text
        byte = _BYTE_TOKEN.fullmatch(token) if self._has_byte_tokens else None
        if byte and int(byte[1], 16) >= 0x80:
            return bytes([int(byte[1], 16)])
        if first:
            return self._decode(token_id).encode()
        return self._decode(self._anchor, token_id)[len(self._decode(self._anchor)) :].encode()

    def _decode(self, *token_ids: int) -> str:
        with translated(lambda error: InternalError(f"the tokenizer cannot decode token ids {token_ids}: {error}")):
            return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def _find_anchor(self) -> int:
        """Any token with visible text: behind it, another token reads as it does in mid-text."""
        for token_id in range(self.size):
            if self._decode(token_id).strip():
                return token_id
        raise UnsupportedModel("a tokenizer needs at least one token with visible text; this one has none")


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """What the decoder does, step by step; UnsupportedModel unless it amounts to one of the three families."""
    if tokenizer.decoder is None:
        return []
    steps = [step for step in _flatten(json.loads(tokenizer.decoder.__getstate__())) if step["type"] != "Fuse"]
    kinds = {str(step["type"]) for step in steps}
    if "ByteLevel" in kinds and kinds <= _TEXT_DECODERS | {"ByteLevel"}:
        # Llama 3 in a GGUF file comes with the steps of Llama 2 before its own.
        steps = [step for step in steps if step["type"] == "ByteLevel" or _changes_any(step, tokenizer)]
        kinds = {str(step["type"]) for step in steps}
    trims_end = any(step["type"] == "Strip" and step["stop"] > 0 for step in steps)
    if trims_end or (kinds != {"ByteLevel"} and not kinds <= _TEXT_DECODERS):
        raise UnsupportedModel(
            f"a tokenizer's decoder must be ByteLevel, or made of {', '.join(sorted(_TEXT_DECODERS))} without trimming the end, "
            f"to be streamed; got {', '.join(sorted(kinds))}"
        )
    return steps


def _changes_any(step: dict[str, Any], tokenizer: Tokenizer) -> bool:
    """Whether a decoder's step that looks at each token makes another text of any; True where that cannot be told. Special tokens
    have no text."""
    special = {added.content for added in tokenizer.get_added_tokens_decoder().values() if added.special}
    tokens = tokenizer.get_vocab(with_added_tokens=True).keys() - special
    match step:
        case {"type": "ByteFallback"}:
            return any(map(_BYTE_TOKEN.fullmatch, tokens))
        case {"type": "Replace", "pattern": {"String": pattern}}:
            return any(pattern in token for token in tokens)
        case _:
            return True


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _flatten(inner)]

"""From the prompt of a request to token ids, within the caps and never on the event loop's thread."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from dataclasses import dataclass

from tokenizers import Tokenizer

from shared.errors import FieldOutOfRange
from shared.pb.quire.v1 import inference_pb2


@dataclass(frozen=True, slots=True)
class PromptLimits:
    max_bytes: int
    max_tokens: int


class PromptEncoder:
    """Encodes the prompts of one engine. Special tokens written in a text are read as such.

    The tokens that the tokenizer puts before a text (a start token, usually) are there exactly once, whether or not a chat
    template has already written them. Prompts given as ids are used as they are.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, limits: PromptLimits, executor: Executor) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._limits = limits
        self._executor = executor
        self._start_ids = tuple(tokenizer.encode("", add_special_tokens=True).ids)

    async def encode(self, request: inference_pb2.GenerateRequest) -> tuple[int, ...]:
        """FieldOutOfRange for no prompt, one over a cap (bytes are checked before anything is tokenised), or an id out of range."""
        match request.WhichOneof("prompt"):
            case "text":
                return self._checked("text", await self._encode_text(request.text))
            case "token_ids":
                return self._checked("token_ids.ids", self._check_ids(request.token_ids))
            case _:
                raise FieldOutOfRange("a request needs a prompt: text or token_ids; got neither", field="prompt")

    async def _encode_text(self, text: str) -> tuple[int, ...]:
        size = len(text.encode())
        if size > self._limits.max_bytes:
            raise _too_long("text", f"{self._limits.max_bytes} bytes", size)
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._tokenise, text)

    def _tokenise(self, text: str) -> tuple[int, ...]:
        # The batch call gives the interpreter lock back while it works and skips offsets nobody needs.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids = tuple(encoding.ids)
        return ids if ids[: len(self._start_ids)] == self._start_ids else self._start_ids + ids

    def _check_ids(self, prompt: inference_pb2.TokenIds) -> tuple[int, ...]:
        if len(prompt.ids) > self._limits.max_tokens:  # before a million ids are copied
            raise _too_long("token_ids.ids", f"{self._limits.max_tokens} tokens", len(prompt.ids))
        ids = tuple(prompt.ids)
        if ids and max(ids) >= self._vocab_size:
            raise FieldOutOfRange(
                f"token_ids.ids must be 0 to {self._vocab_size - 1}, this engine's vocabulary; got {max(ids)}",
                field="token_ids.ids",
            )
        return ids

    def _checked(self, field: str, ids: tuple[int, ...]) -> tuple[int, ...]:
        if not ids:
            raise FieldOutOfRange(f"{field} must hold at least one token; got none", field=field)
        if len(ids) > self._limits.max_tokens:
            raise _too_long(field, f"{self._limits.max_tokens} tokens", len(ids))
        return ids


def _too_long(field: str, limit: str, got: int) -> FieldOutOfRange:
    return FieldOutOfRange(f"{field} must be at most {limit}; got {got}", field=field, details={"expected": limit, "got": str(got)})

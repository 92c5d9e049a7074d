"""From the prompt of a request to token ids, within the caps and never on the event loop's thread."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from dataclasses import dataclass

from tokenizers import Tokenizer

from shared.errors import FieldOutOfRange
from shared.panics import translated
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

    def __init__(self, tokenizer: Tokenizer, limits: PromptLimits, executor: Executor) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._executor = executor
        self._start_ids = tuple(tokenizer.encode("", add_special_tokens=True).ids)

    async def encode(self, request: inference_pb2.GenerateRequest) -> tuple[int, ...]:
        """FieldOutOfRange for no prompt or one over a cap; bytes are counted before anything is tokenised."""
        match request.WhichOneof("prompt"):
            case "text":
                size = len(request.text.encode())
                if size > self._limits.max_bytes:
                    raise _too_long("text", f"{self._limits.max_bytes} bytes", size)
                ids = await asyncio.get_running_loop().run_in_executor(self._executor, self._tokenise, request.text)
                self._check_length("text", len(ids))
                return ids
            case "token_ids":
                self._check_length("token_ids.ids", len(request.token_ids.ids))
                return tuple(request.token_ids.ids)
            case _:
                raise FieldOutOfRange("a request needs a prompt: text or token_ids; got neither", field="prompt")

    def _tokenise(self, text: str) -> tuple[int, ...]:
        with translated(_not_encoded):
            # The batch call gives the interpreter lock back while it works and skips offsets nobody needs.
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids = tuple(encoding.ids)
        return ids if ids[: len(self._start_ids)] == self._start_ids else self._start_ids + ids

    def _check_length(self, field: str, length: int) -> None:
        if length > self._limits.max_tokens:
            raise _too_long(field, f"{self._limits.max_tokens} tokens", length)


def _not_encoded(error: BaseException) -> FieldOutOfRange:
    return FieldOutOfRange(f"text must be what this model's tokenizer can encode; it says: {error}", field="text")


def _too_long(field: str, limit: str, got: int) -> FieldOutOfRange:
    return FieldOutOfRange(f"{field} must be at most {limit}; got {got}", field=field, details={"expected": limit, "got": str(got)})

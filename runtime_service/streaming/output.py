"""From sampled tokens to what the caller sees of one sample: deltas and the reason of its end, in one place for every mode."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from runtime_service.core.params import StopParams
from runtime_service.core.sampled import SampledToken
from runtime_service.streaming.detokenize import IncrementalDetokenizer
from runtime_service.streaming.events import Finished, FinishReason, TokenDelta
from runtime_service.streaming.stop import StopMatcher
from runtime_service.streaming.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Output:
    """What one token, or the end, leads to. The delta, if any, is sent before the finish."""

    delta: TokenDelta | None
    finish: Finished | None


class OutputAssembler:
    """Output of sample `index`; lives on the serving loop's thread. Once an Output has a finish, nothing more may be asked.

    A text ends just before a stop string or a stop token. Nothing ends it before `min_tokens` tokens: until then the text is not
    searched, and an end token (which the sampler does not choose by then) is a token like others.
    """

    def __init__(self, index: int, vocabulary: Vocabulary, params: StopParams, eos_ids: Collection[int]) -> None:
        self._index = index
        self._params = params
        self._end_ids = params.end_ids(eos_ids)
        self._detokenizer = IncrementalDetokenizer(vocabulary)
        self._matcher = StopMatcher(params.stop)
        self.num_tokens = 0

    def push(self, token: SampledToken) -> Output:
        """Take one token. InternalError if its id is outside the vocabulary; the sample is then lost, its neighbours are not."""
        self.num_tokens += 1
        if self.num_tokens > self._params.min_tokens and token.token_id in self._end_ids:
            stop_id = token.token_id if token.token_id in self._params.stop_token_ids else None
            return self._close(FinishReason.STOP, token, "", stop_id)
        text, match = self._detokenizer.push(token.token_id), None
        if self.num_tokens >= self._params.min_tokens:
            text, match = self._matcher.push(text)
        if match is not None:
            return self._output(token, text, Finished(self._index, FinishReason.STOP, match))
        if self.num_tokens >= self._params.max_tokens:
            return self._close(FinishReason.LENGTH, token, text)
        return self._output(token, text, None)

    def cancel(self) -> Output:
        """End the sample because somebody asked for it; text that is still withheld comes with it."""
        return self._output(None, self._rest()[0], Finished(self._index, FinishReason.CANCELLED))

    def _close(self, reason: FinishReason, token: SampledToken, text: str, stop_id: int | None = None) -> Output:
        """Show what is withheld. A stop string in it, which only the end of the text made final, is the reason then."""
        rest, stop = self._rest()
        finish = Finished(self._index, reason, stop_id) if stop is None else Finished(self._index, FinishReason.STOP, stop)
        return self._output(token, text + rest, finish)

    def _rest(self) -> tuple[str, str | None]:
        """Text still withheld, and the stop string it stops at, if any."""
        text, match = self._matcher.push(self._detokenizer.flush())
        if match is not None:
            return text, match
        rest, match = self._matcher.flush()
        return text + rest, match

    def _output(self, token: SampledToken | None, text: str, finish: Finished | None) -> Output:
        tokens = () if token is None else (token,)
        return Output(TokenDelta(self._index, tokens, text) if tokens or text else None, finish)

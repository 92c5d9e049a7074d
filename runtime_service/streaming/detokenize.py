"""Token ids to text, one at a time, never showing part of a character."""

from __future__ import annotations

import codecs

from runtime_service.streaming.vocabulary import Vocabulary


class IncrementalDetokenizer:
    """The deltas of `push` and `flush` together are the decoding of all ids, special tokens left out.

    Bytes that are no UTF-8 read as replacement marks, an incomplete character as one. NOTE: `Tokenizer.decode` differs for
    byte-fallback vocabularies there: it replaces the valid characters of such a run of byte tokens as well, which a stream that
    has shown them cannot do.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = True

    def push(self, token_id: int) -> str:
        """Text that token `token_id` completes; InternalError if it is no id of the vocabulary."""
        piece = self._vocabulary.piece(token_id, first=self._first)
        if piece is None:
            return ""
        self._first = False
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """The text has ended: a replacement mark if a character was left incomplete."""
        return self._utf8.decode(b"", final=True)

"""Find stop strings in text that arrives in pieces, without showing any part of one before it is ruled out.

The outcome is a function of the text alone, however it is cut into pieces: the match that starts earliest wins, and of those that
start together the shortest. A match is therefore final only when no stop string that began before it can still complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class _Pattern:
    """One stop string as a Knuth-Morris-Pratt automaton; `matched` characters of it end the text read so far."""

    text: str
    borders: list[int]
    matched: int = 0

    @classmethod
    def of(cls, text: str) -> _Pattern:
        borders, length = [0] * len(text), 0
        for index in range(1, len(text)):
            while length and text[index] != text[length]:
                length = borders[length - 1]
            length += text[index] == text[length]
            borders[index] = length
        return cls(text, borders)

    def advance(self, char: str) -> bool:
        """Read one character; True if it completes the string."""
        if self.matched == len(self.text):
            self.matched = self.borders[-1]
        while self.matched and char != self.text[self.matched]:
            self.matched = self.borders[self.matched - 1]
        self.matched += char == self.text[self.matched]
        return self.matched == len(self.text)


class StopMatcher:
    """Linear in the text whatever the strings are. After a match nothing more may be pushed."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._patterns = [_Pattern.of(text) for text in stops]
        self._withheld = ""
        self._best: tuple[int, str] | None = None
        """Earliest complete match: where it starts in the withheld text, and its string."""

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that is safe to show now, and the stop string once one has matched; the text then ends just before it."""
        if not self._patterns:
            return text, None
        start = len(self._withheld)
        self._withheld += text
        for end in range(start + 1, len(self._withheld) + 1):
            self._read(end)
            if self._best is not None and self._pending_from(end) >= self._best[0]:
                return self.flush()
        safe = self._pending_from(len(self._withheld))
        if self._best is not None:  # it starts behind `safe`, or it would have been final
            self._best = (self._best[0] - safe, self._best[1])
        shown, self._withheld = self._withheld[:safe], self._withheld[safe:]
        return shown, None

    def flush(self) -> tuple[str, str | None]:
        """The text has ended: what was withheld, up to the earliest match if there is one."""
        text, best = self._withheld, self._best
        self._withheld, self._best = "", None
        return (text, None) if best is None else (text[: best[0]], best[1])

    def _read(self, end: int) -> None:
        """Advance every string over the character before `end` and keep the earliest match."""
        for pattern in self._patterns:
            if pattern.advance(self._withheld[end - 1]):
                match = (end - len(pattern.text), pattern.text)
                if self._best is None or match[0] < self._best[0]:
                    self._best = match

    def _pending_from(self, end: int) -> int:
        """Start of the earliest stop string that has begun and reaches up to `end`; `end` if there is none."""
        return min(end - pattern.matched for pattern in self._patterns)

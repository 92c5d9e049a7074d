"""Text from elsewhere, made fit to be stored and sent."""

from __future__ import annotations

MAX_CHARS = 2000


def clip(text: str) -> str:
    """`text` as valid UTF-8 of at most MAX_CHARS characters: lone surrogates become '?', what is cut off an ellipsis."""
    clean = text.encode("utf-8", "replace").decode()
    return clean if len(clean) <= MAX_CHARS else clean[: MAX_CHARS - 1] + "…"

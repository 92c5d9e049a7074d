"""What `transformers` calls the cache it is given: `cache` of late, `past_key_values` in older releases and some models."""

from __future__ import annotations

import inspect
from collections.abc import Callable


def cache_name(forward: Callable[..., object]) -> str:
    """The argument of a model's `forward` that takes its cache."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"

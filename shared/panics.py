"""Libraries written in Rust (tokenizers, safetensors, obstore) report some errors by a panic: an exception that is no `Exception`.

An `except Exception` lets it pass, and where nothing else catches it a thread ends without a word, or a call without a status.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

NOT_ERRORS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
"""What is no error although it is raised: somebody wants the end."""


@contextmanager
def translated(to_error: Callable[[BaseException], Exception]) -> Iterator[None]:
    """Whatever the library raises, its panics included, as the error that `to_error` makes of it."""
    try:
        yield
    except NOT_ERRORS:
        raise
    except BaseException as error:  # a panic is nothing narrower
        raise to_error(error) from error

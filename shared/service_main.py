"""How the process of a service begins and ends, whichever service it is."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import TypeVar

from shared.config import ServiceSettings
from shared.errors import FieldOutOfRange, QuireError
from shared.telemetry.log import configure_logging

_Settings = TypeVar("_Settings", bound=ServiceSettings)


def run_service(
    name: str, read_settings: Callable[[], _Settings], serve: Callable[[_Settings], Coroutine[object, object, None]]
) -> None:
    """Read the settings, log as `name`, serve until told to stop.

    Bad settings, and an error of ours that ends `serve`, end the process with a message and exit code 1.
    """
    try:
        settings = read_settings()
        configure_logging(name, settings.log_level)
    except (ValueError, FieldOutOfRange) as error:
        sys.exit(f"bad settings: {error}")
    try:
        asyncio.run(serve(settings))
    except QuireError as error:
        sys.exit(error.message)

"""How a service's process begins and ends: settings are read once, then served; an end is told by one line and an exit code."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_settings import SettingsError

from shared.config import ServiceSettings
from shared.errors import FieldOutOfRange, InvalidInput, QuireError
from shared.telemetry.log import configure_logging

FAILED, BAD_INPUT = 1, 2
"""Exit codes of a service that ends by itself; the second where it will not serve as long as it is asked to serve like this."""

Settings = TypeVar("Settings", bound=ServiceSettings)


def run_service(name: str, settings_type: type[Settings], serve: Callable[[Settings], Coroutine[Any, Any, None]]) -> None:
    """Serve until told to stop. An error of ours is one line on standard error; logs carry `name`."""
    try:
        settings = read_settings(settings_type)
        configure_logging(name, settings.log_level)
        asyncio.run(serve(settings))
    except QuireError as error:
        sys.stderr.write(f"{error.message}\n")
        sys.exit(BAD_INPUT if isinstance(error, InvalidInput) else FAILED)


def read_settings(settings_type: type[Settings]) -> Settings:
    """The settings of the environment; FieldOutOfRange says by variable what is wrong with them."""
    from_environment: Callable[[], Settings] = settings_type  # each service's own class has a default for every field
    try:
        return from_environment()
    except ValidationError as error:
        prefix = settings_type.model_config.get("env_prefix", "")
        faults = "; ".join(_fault(prefix, fault["loc"], fault["msg"]) for fault in error.errors())
        raise FieldOutOfRange(f"bad settings: {faults}") from error
    except (SettingsError, FieldOutOfRange) as error:  # no JSON where a variable holds some; what a field's own class refuses
        raise FieldOutOfRange(f"bad settings: {error}") from error


def _fault(prefix: str, path: tuple[int | str, ...], message: str) -> str:
    """The variable is the field's, or its alias, which has the prefix of no service; a rule over several fields has none."""
    first, *rest = path or ("",)
    words = [str(first) if str(first).isupper() or not path else f"{prefix}{str(first).upper()}", *map(str, rest)]
    where = ".".join(filter(None, words))
    return ": ".join(filter(None, (where, message.removeprefix("Value error, "))))

"""Structured logs: one JSON object a line on standard error, the same keys in both services."""

from __future__ import annotations

import logging
import sys

import structlog

from shared.errors import FieldOutOfRange


def configure_logging(service: str, level: str = "info") -> None:
    """Call once at start. Every line carries time (UTC), level, service and event; bind request_id or job_id where one is known."""
    number = getattr(logging, level.upper(), None)
    if not isinstance(number, int):
        raise FieldOutOfRange(f"log level must be debug, info, warning or error; got {level!r}", field="log_level")
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.dict_tracebacks,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
    )
    structlog.contextvars.bind_contextvars(service=service)

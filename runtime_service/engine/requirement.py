"""One refusal for everything an engine states that is not so where it is loaded."""

from __future__ import annotations

from shared.errors import EngineIncompatible


def require(field: str, expected: object, got: object) -> None:
    """EngineIncompatible, naming the field and both sides, unless they are equal."""
    if expected != got:
        raise EngineIncompatible(
            f"{field}: the engine needs {expected}, here is {got}; compile it again for this host",
            details={"field": field, "expected": str(expected), "got": str(got)},
        )

"""A fence that a test opens."""

from __future__ import annotations


class Gate:
    """Passes when told to, or when somebody waits for it; `waits` counts those who had to."""

    def __init__(self) -> None:
        self.open, self.waits = False, 0

    def passed(self) -> bool:
        return self.open

    def wait(self) -> None:
        self.waits += not self.open
        self.open = True

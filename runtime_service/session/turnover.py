"""How soon a place becomes free: the hint that goes with a refusal for a full queue."""

from __future__ import annotations

_WEIGHT = 0.2
_FIRST_GUESS_S = 1.0


class Turnover:
    """Smoothed running time of a request, divided by how many run at once."""

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self.seconds = _FIRST_GUESS_S

    def note(self, ran_s: float) -> None:
        """A request has ended that ran `ran_s`."""
        self.seconds += _WEIGHT * (ran_s / self._num_places - self.seconds)

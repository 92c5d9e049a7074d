"""Which replica a request goes to: the one whose pages are used least, by what it last reported and what is under way now. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """One engine on one replica, as last reported. `running` counts the requests that hold the pages in use."""

    pages_total: int
    pages_free: int
    running: int

    def share_used(self, under_way: int) -> float:
        """Share of the pages in use once each of `under_way` requests has as many as the mean of those that ran. Where none ran, a
        request counts as one page: enough to tell replicas apart."""
        used = self.pages_total - self.pages_free
        pages_a_request = max(1.0, used / self.running) if self.running else 1.0
        return under_way * pages_a_request / max(1, self.pages_total)


def least_loaded(loads: Sequence[ReplicaLoad | None], under_way: Sequence[int]) -> int | None:
    """Index of the replica to send to; None where nobody serves the engine. `loads` has None for a replica that does not;
    `under_way` counts the requests that each has and has not ended."""
    shares = [(load.share_used(count), index) for index, (load, count) in enumerate(zip(loads, under_way, strict=True)) if load]
    return min(shares)[1] if shares else None

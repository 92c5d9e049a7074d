"""Which replica a request goes to: the one whose pages are used least, counting what was sent since its last report. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """One engine on one replica, as last reported. `requests` counts those waiting and running."""

    pages_total: int
    pages_free: int
    requests: int

    def share_used(self, sent_since: int) -> float:
        """Share of the pages in use once `sent_since` more requests, each like those that run, have their pages. A request that
        nobody runs yet counts as one page: enough to tell replicas apart."""
        used = self.pages_total - self.pages_free
        pages_a_request = max(1.0, used / self.requests) if self.requests else 1.0
        return (used + sent_since * pages_a_request) / max(1, self.pages_total)


def least_loaded(loads: Sequence[ReplicaLoad | None], sent_since: Sequence[int]) -> int | None:
    """Index of the replica to send to; None where nobody serves the engine. `loads` has None for a replica that does not;
    `sent_since` counts what went to each since its report."""
    shares = [(load.share_used(sent), index) for index, (load, sent) in enumerate(zip(loads, sent_since, strict=True)) if load]
    return min(shares)[1] if shares else None

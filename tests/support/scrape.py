"""Read a service's metrics the way Prometheus does: over HTTP, from the text."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True)
class Scrape:
    """One reading of everything. Sample names are those a query uses: `_total`, `_bucket`, `_sum`, `_count` included."""

    samples: dict[tuple[str, frozenset[tuple[str, str]]], float]
    types: dict[str, str]

    @classmethod
    def of(cls, families: Iterable[Metric]) -> Scrape:
        families = list(families)
        samples = {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}
        return cls(samples, {family.name: family.type for family in families})

    def __call__(self, name: str, **labels: str) -> float:
        """The value of the one series of this name with these labels (it may have more)."""
        (value,) = (v for (n, found), v in self.samples.items() if n == name and labels.items() <= dict(found).items())
        return value

    def series(self, name: str) -> list[dict[str, str]]:
        return [dict(labels) for found, labels in self.samples if found == name]

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.samples}


def read(address: str) -> Scrape:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        return Scrape.of(text_string_to_metric_families(answer.read().decode()))


async def scrape(address: str) -> Scrape:
    return await asyncio.to_thread(read, address)

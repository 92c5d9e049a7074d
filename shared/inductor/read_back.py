"""A package's own account of its pools against the cache it should serve: asked when it is built and when it is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shared.inductor.package import PoolUse
from shared.kv_spec import KVCacheSpec


@dataclass(frozen=True, slots=True)
class Mismatch:
    """`field` is the part of the manifest that the package contradicts."""

    field: str
    expected: str
    got: str


def compare_pools(uses: Sequence[PoolUse], cache: KVCacheSpec) -> Iterator[Mismatch]:
    """Every layer must attend over a pool of its own, in the cache's layout and within its window, at the caller's address."""
    wanted = [(cache.layout.page_dim, group.window) for _, group in cache.iter_layers()]
    got = [(use.page_dim, use.window) for use in uses]
    if got != wanted:
        yield Mismatch("cache", f"pools of (page axis, window) {wanted}", str(got))
    in_place = len({use.pool for use in uses if use.in_place})
    if in_place != len(wanted):
        yield Mismatch("aliases", f"{len(wanted)} pools written in place", str(in_place))

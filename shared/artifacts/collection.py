"""Which artifacts a garbage collection removes: a pure choice, made from one listing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shared.artifacts.store import ArtifactInfo
from shared.ids import ArtifactId


def choose_removals(
    infos: Sequence[ArtifactInfo], *, now_s: float, max_bytes: int | None, max_age_s: float | None
) -> tuple[ArtifactId, ...]:
    """Ids to remove, in an order in which an engine goes before the model it needs.

    First everything unused for longer than `max_age_s`, then the least recently used until at most `max_bytes` are left. What is in
    use stays, and so does a model as long as one engine that needs it stays.
    """
    kept = {info.artifact_id: info for info in infos}
    removed: list[ArtifactId] = []

    def remove_one(used_before_s: float) -> bool:
        """Remove the least recently used artifact that may go; False if there is none."""
        needed = {info.model_id for info in kept.values()}
        free = [info for info in kept.values() if not info.in_use and info.artifact_id not in needed]
        victim = min(free, key=lambda info: (info.last_used_s, info.artifact_id), default=None)
        if victim is None or victim.last_used_s >= used_before_s:
            return False
        removed.append(victim.artifact_id)
        del kept[victim.artifact_id]
        return True

    if max_age_s is not None:
        while remove_one(now_s - max_age_s):
            pass
    if max_bytes is not None:
        while sum(info.size_bytes for info in kept.values()) > max_bytes and remove_one(math.inf):
            pass
    return tuple(removed)

"""The policies a request may name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from runtime_service.compaction.policies.knorm import KNorm
from runtime_service.compaction.policies.sink_recent import SinkRecent
from runtime_service.compaction.policy import Policy
from runtime_service.core.params import CompactionParams
from shared.errors import FieldOutOfRange
from shared.manifest import EngineManifest

POLICIES: Mapping[str, Policy] = MappingProxyType({"knorm": KNorm(), "sink_recent": SinkRecent()})


def check_policy(params: CompactionParams, manifest: EngineManifest) -> None:
    """FieldOutOfRange for an unknown policy, for one that scores keys where no layer holds every entry's key, and for any on an
    engine that rotates by cells."""
    params.check_policy(POLICIES)
    if not manifest.takes_positions:
        raise FieldOutOfRange(
            "this engine takes positions for cells, as its program was exported, so entries cannot be moved; send off, or compile "
            "a checkpoint or a program that takes position_ids",
            field="kv.policy.name",
        )
    if POLICIES[params.policy].reads_keys and all(group.window is not None for group in manifest.cache.groups):
        raise FieldOutOfRange(
            f"policy {params.policy} scores the keys of layers that attend over everything; this model has sliding windows only. "
            "Use sink_recent",
            field="kv.policy.name",
        )

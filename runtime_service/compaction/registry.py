"""The policies a request may name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from runtime_service.compaction.policies.knorm import KNorm
from runtime_service.compaction.policies.sink_recent import SinkRecent
from runtime_service.compaction.policy import Policy
from runtime_service.core.params import CompactionParams
from shared.errors import FieldOutOfRange
from shared.kv_spec import KVCacheSpec

POLICIES: Mapping[str, Policy] = MappingProxyType({"knorm": KNorm(), "sink_recent": SinkRecent()})


def check_policy(params: CompactionParams, spec: KVCacheSpec) -> None:
    """FieldOutOfRange for an unknown policy, and for one that scores keys where no layer holds every entry's key."""
    params.check_policy(POLICIES)
    if POLICIES[params.policy].reads_keys and all(group.window is not None for group in spec.groups):
        raise FieldOutOfRange(
            f"policy {params.policy} scores the keys of layers that attend over everything; this model has sliding windows only. "
            "Use sink_recent",
            field="kv.policy.name",
        )

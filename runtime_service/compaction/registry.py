"""The policies a request may name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from runtime_service.compaction.policies.knorm import KNorm
from runtime_service.compaction.policies.sink_recent import SinkRecent
from runtime_service.compaction.policy import Policy

POLICIES: Mapping[str, Policy] = MappingProxyType({"knorm": KNorm(), "sink_recent": SinkRecent()})

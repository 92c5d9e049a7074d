"""The policies a request may name, and what an engine's cache can do with them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from runtime_service.compaction.policies.knorm import KNorm
from runtime_service.compaction.policies.sink_recent import SinkRecent
from runtime_service.compaction.policy import Policy
from runtime_service.core.params import CompactionParams
from shared.errors import FieldOutOfRange
from shared.kernels.compaction.modes import Mode, RowMode
from shared.kv_spec import KVCacheSpec
from shared.manifest import EngineManifest

POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "knorm": KNorm(),
        "knorm_per_head": KNorm(RowMode.PER_HEAD),
        "knorm_per_layer_head": KNorm(RowMode.PER_LAYER_HEAD),
        "sink_recent": SinkRecent(),
    }
)


def check_policy(params: CompactionParams, manifest: EngineManifest, draft: KVCacheSpec | None = None) -> None:
    """FieldOutOfRange for an unknown policy, for any on an engine that rotates by cells, and for what its cache, and that of its
    draft, cannot do.

    That is to score keys where no layer holds every entry's key, to give each head a row of its own where layers have different
    heads or a draft's layers follow, and to fill holes where a layer's window is masked by the order of cells.
    """
    params.check_policy(POLICIES)
    if not manifest.takes_positions:
        raise FieldOutOfRange(
            "this engine takes positions for cells, as its program was exported, so entries cannot be moved; send off, or compile "
            "a checkpoint or a program that takes position_ids",
            field="kv.policy.name",
        )
    policy, spec = POLICIES[params.policy], manifest.cache
    full = [group for group in spec.groups if group.window is None]
    if policy.reads_keys and not full:
        raise FieldOutOfRange(
            f"policy {params.policy} scores the keys of layers that attend over everything; this model has sliding windows only. "
            "Use sink_recent",
            field="kv.policy.name",
        )
    heads = sorted({group.kv_heads for group in full})
    if policy.rows is RowMode.PER_HEAD and len(heads) > 1:
        raise FieldOutOfRange(
            f"policy {params.policy} needs layers with the same number of KV heads; this model's have {heads}. "
            "Use knorm_per_layer_head",
            field="kv.policy.name",
        )
    if policy.rows is not RowMode.UNION and draft is not None:
        raise FieldOutOfRange(
            f"policy {params.policy} lets heads keep entries of their own; a draft's cache follows one decision for all. Use knorm",
            field="kv.policy.name",
        )
    windows = [*spec.windows, *(draft.windows if draft is not None else ())]
    if params.mode is Mode.HOLE_FILLING and windows:
        raise FieldOutOfRange(
            f"kv.policy.mode hole_filling changes the order of entries, by which layers with windows of {windows} are masked. "
            "Use ordered",
            field="kv.policy.mode",
        )

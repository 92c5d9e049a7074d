"""Checks of a step's inputs on the host. Generated code checks nothing: a bad index ends the process or corrupts a neighbour."""

from __future__ import annotations

import weakref

from torch import Tensor, arange, equal, int32

from runtime_service.engine.engine import EngineInputs
from runtime_service.kv.pool import KVPool
from shared.bindings import BLOCK_TABLE, INPUT_IDS, LAST_INDEX, POSITION_IDS, WRITE_START
from shared.errors import EngineIncompatible, FieldOutOfRange
from shared.manifest import EngineManifest


class StepCheck:
    """What every step of one engine is checked by: the pool when it is first used, the inputs on every call."""

    def __init__(self, manifest: EngineManifest) -> None:
        self._manifest = manifest
        self._checked_pool: weakref.ref[KVPool] | None = None

    def __call__(self, inputs: EngineInputs, pool: KVPool) -> None:
        """EngineIncompatible as for `check_pool`, FieldOutOfRange as for `check_inputs`."""
        if self._checked_pool is None or self._checked_pool() is not pool:
            check_pool(pool, self._manifest)
            self._checked_pool = weakref.ref(pool)
        check_inputs(inputs, self._manifest, pool.num_pages)


def check_inputs(inputs: EngineInputs, manifest: EngineManifest, num_pages: int) -> None:
    """FieldOutOfRange naming the input unless the step is safe to launch on a pool of `num_pages`.

    Every new token must fall into the row's block table: `write_start + query_len <= width * page_size`.
    """
    if inputs.profile not in {profile.name for profile in manifest.profiles.profiles}:
        names = ", ".join(profile.name for profile in manifest.profiles.profiles)
        raise FieldOutOfRange(f"profile must be one of {names}; got {inputs.profile!r}", field="profile")
    if inputs.input_ids.dim() != 2:
        raise FieldOutOfRange(f"{INPUT_IDS} must be [batch, query_len]; got {_shape(inputs.input_ids)}", field=INPUT_IDS)
    batch, query_len = inputs.batch, inputs.query_len
    manifest.profiles.check(inputs.profile, batch, query_len)
    cache = manifest.cache
    if inputs.block_table.dim() != 2 or not 1 <= inputs.block_table.shape[1] <= cache.max_pages:
        raise FieldOutOfRange(
            f"{BLOCK_TABLE} must be [{batch}, 1..{cache.max_pages}]; got {_shape(inputs.block_table)}", field=BLOCK_TABLE
        )
    width = inputs.block_table.shape[1]
    capacity = width * cache.page_size
    if query_len > capacity:
        raise FieldOutOfRange(f"{query_len} new tokens a row do not fit into {width} pages of {cache.page_size}", field=BLOCK_TABLE)
    if inputs.input_ids.device.type == "cpu":
        _check(INPUT_IDS, inputs.input_ids, (batch, query_len), manifest.model.vocab_size)
    elif inputs.input_ids.dtype is not int32:
        raise FieldOutOfRange(f"{INPUT_IDS} must be int32; got {inputs.input_ids.dtype}", field=INPUT_IDS)
    _check(POSITION_IDS, inputs.position_ids, (batch, query_len), manifest.model.max_position)
    _check(WRITE_START, inputs.write_start, (batch,), capacity - query_len + 1)
    _check(LAST_INDEX, inputs.last_index, (batch,), query_len)
    _check(BLOCK_TABLE, inputs.block_table, (batch, width), num_pages)
    if not manifest.takes_positions:
        cells = inputs.write_start[:, None] + arange(query_len, dtype=int32)
        if not equal(inputs.position_ids, cells):
            raise FieldOutOfRange(
                f"{POSITION_IDS} must be the cells written, {WRITE_START} + 0..{query_len}: this engine rotates by them; got "
                f"{inputs.position_ids.tolist()} for {WRITE_START} {inputs.write_start.tolist()}",
                field=POSITION_IDS,
            )


def _check(name: str, tensor: Tensor, shape: tuple[int, ...], end: int) -> None:
    """`tensor` is int32, on the host, contiguous, of `shape`, with every value in `0 .. end`."""
    if tensor.dtype is not int32 or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise FieldOutOfRange(
            f"{name} must be a contiguous int32 tensor on the host; got {tensor.dtype} on {tensor.device}", field=name
        )
    if tuple(tensor.shape) != shape:
        raise FieldOutOfRange(f"{name} must be {list(shape)}; got {_shape(tensor)}", field=name)
    low, high = (int(bound) for bound in tensor.aminmax())
    if low < 0 or high >= end:
        raise FieldOutOfRange(f"{name} must lie in 0..{end - 1}; got {low if low < 0 else high}", field=name)


def check_pool(pool: KVPool, manifest: EngineManifest) -> None:
    """EngineIncompatible unless the pool's tensors are what the engine writes: shape, dtype, contiguous, on the engine's device."""
    if pool.spec != manifest.cache:
        raise EngineIncompatible(
            f"the engine writes caches of {manifest.cache}; the pool holds {pool.spec}",
            details={"field": "cache", "expected": str(manifest.cache), "got": str(pool.spec)},
        )
    for (layer, group), tensor in zip(pool.spec.iter_layers(), pool.tensors, strict=True):
        wanted = (pool.spec.pool_shape(group, pool.num_pages), f"torch.{group.dtype.value}", manifest.target.device, True)
        got = (tuple(tensor.shape), str(tensor.dtype), tensor.device.type, tensor.is_contiguous())
        if wanted != got:
            raise EngineIncompatible(
                f"pool of layer {layer} must have (shape, dtype, device, contiguous) {wanted}; got {got}",
                details={"field": f"kv_pool.{layer}", "expected": str(wanted), "got": str(got)},
            )


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)

"""From a scheduled batch to what the engine reads. Every call makes fresh tensors: a step in flight keeps its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from runtime_service.core.batch import ScheduledBatch
from runtime_service.engine.engine import EngineInputs
from runtime_service.kv.page_table import PageTable
from shared.errors import InternalError
from shared.kernels.upload import upload
from shared.kv_spec import KVCacheSpec


def build_inputs(batch: ScheduledBatch, spec: KVCacheSpec) -> EngineInputs:
    """int32 host tensors for one step; positions are logical, write starts physical.

    InternalError if a sequence does not own the cells its new tokens go to: they would land on the dump page and be lost. What
    values an engine admits is checked by the engine, for every caller.
    """
    count = batch.query_len
    for sequence in batch.sequences:
        capacity = len(sequence.pages) * spec.page_size
        if sequence.physical_len + count > capacity:
            raise InternalError(f"{sequence} was scheduled {count} tokens; its pages hold {capacity} entries")
    first_B = np.asarray([sequence.computed for sequence in batch.sequences], dtype=np.int32)
    return EngineInputs(
        profile=batch.profile,
        input_ids=_int32([sequence.tokens[sequence.computed : sequence.computed + count] for sequence in batch.sequences]),
        position_ids=torch.from_numpy(first_B[:, None] + np.arange(count, dtype=np.int32)),
        write_start=_int32([sequence.physical_len for sequence in batch.sequences]),
        last_index=torch.full((len(batch.sequences),), count - 1, dtype=torch.int32),
        block_table=_int32([PageTable(sequence.pages, spec.page_size).row(spec.max_pages) for sequence in batch.sequences]),
    )


def take_ids(inputs: EngineInputs, unseen: Mapping[int, int], ids: torch.Tensor) -> EngineInputs:
    """A decode step whose row r takes the token that the device holds in `ids[unseen[r]]`; other rows' tokens are known.

    `ids` is int32 on the engine's device, and so are the new step's input ids. Nothing waits for the device.
    """
    batch = inputs.batch
    assert inputs.query_len == 1, inputs.query_len
    if list(unseen.items()) == [(row, row) for row in range(batch)]:
        return replace(inputs, input_ids=ids[:batch, None])
    place = torch.tensor([unseen.get(row, len(ids) + row) for row in range(batch)])
    known = inputs.input_ids[:, 0]
    known, place = upload(known, ids.device), upload(place, ids.device)
    return replace(inputs, input_ids=torch.cat([ids, known])[place, None])


def _int32(values: Sequence[int] | Sequence[Sequence[int]] | Sequence[NDArray[np.int32]]) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.int32))

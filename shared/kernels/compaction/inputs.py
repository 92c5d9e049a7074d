"""What changes from round to round: decisions and lengths, as tensors that movers read in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from shared.kernels.compaction.layout import CacheLayout, Family
from shared.kernels.compaction.modes import RowMode
from shared.kernels.upload import upload_into

_ALIGNMENT = 32
"""Elements: every tensor begins at a multiple of 128 bytes, as kernels expect of tensors of their own."""


@dataclass(frozen=True, slots=True)
class RequestRound:
    """One request's part of a round, on the host.

    `kept` `[decision_rows, keep]`: ordinals of survivors, strictly increasing in a row, within `base..valid_len`. `base`: first
    ordinal that may be rewritten. `valid_len`: entries held now. `tail`: cells from `valid_len` on that a step in flight writes;
    they move right behind the kept ones. `draft_tail` is the same of the draft cache.
    """

    kept: NDArray[np.int32]
    base: int
    valid_len: int
    tail: int = 0
    draft_tail: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class RoundInputs:
    """Tensors a round reads; all int32, contiguous, on the pools' device. Fill them with `stage` or in place on the device.

        packed        the memory of those below, so that a round is uploaded in one copy

        kept          [batch, decision_rows, keep_capacity]   kept ordinals; entries past a request's count are ignored
        move_offsets  [batch + 1]   exclusive prefix sum of moves = keep + tail; rows past the active requests repeat the last value
        tail          [batch]       protected cells; so request r keeps `move_offsets[r + 1] - move_offsets[r] - tail[r]` entries
        draft_tail    [batch]       protected cells of the draft cache
        base          [batch]       first ordinal that may be rewritten
        valid_len     [batch]       entries held before the round

    A request without moves is left alone. `min_keep` is the largest masked window: a request must keep as many.
    """

    packed: torch.Tensor
    kept: torch.Tensor
    move_offsets: torch.Tensor
    tail: torch.Tensor
    draft_tail: torch.Tensor
    base: torch.Tensor
    valid_len: torch.Tensor
    row_mode: RowMode
    tail_capacity: int
    min_keep: int = 0

    @classmethod
    def allocate(cls, layout: CacheLayout, *, row_mode: RowMode, keep_capacity: int, tail_capacity: int = 0) -> RoundInputs:
        """Zeroed inputs for up to as many requests as the layout's block tables have rows."""
        table = layout.groups[0].block_table
        batch, device = table.shape[0], table.device

        rows = decision_rows(layout, row_mode)
        lengths = -(-(batch + 1) // _ALIGNMENT) * _ALIGNMENT
        packed = torch.zeros(5 * lengths + batch * rows * keep_capacity, dtype=torch.int32, device=device)
        offsets, tail, draft_tail, base, valid_len = packed[: 5 * lengths].view(5, lengths)
        return cls(
            packed=packed,
            kept=packed[5 * lengths :].view(batch, rows, keep_capacity),
            move_offsets=offsets[: batch + 1],
            tail=tail[:batch],
            draft_tail=draft_tail[:batch],
            base=base[:batch],
            valid_len=valid_len[:batch],
            row_mode=row_mode,
            tail_capacity=tail_capacity,
            min_keep=max((group.window or 0 for group in layout.groups if group.family is Family.MASKED_WINDOW), default=0),
        )

    @property
    def batch(self) -> int:
        return self.kept.shape[0]

    @property
    def keep_capacity(self) -> int:
        return self.kept.shape[2]

    def stage(self, requests: Sequence[RequestRound]) -> int:
        """Write one round's values, request i in row i, and return the request count for `compact`.

        Raises ValueError, before anything is written, for shapes and counts that do not fit; the ordinals themselves are the
        business of the value check.
        """
        if len(requests) > self.batch:
            raise ValueError(f"requests: expected at most {self.batch}, got {len(requests)}")
        for index, request in enumerate(requests):
            self._check(index, request)
        start, (_, rows, capacity) = self.kept.storage_offset(), self.kept.shape
        host = np.zeros(start + len(requests) * rows * capacity, dtype=np.int32)
        moves = np.zeros(self.batch, dtype=np.int32)
        for index, (kept, request) in enumerate(zip(host[start:].reshape(len(requests), rows, capacity), requests, strict=True)):
            keep = request.kept.shape[1]
            kept[:, :keep] = request.kept
            moves[index] = keep + request.tail
            for name in ("tail", "draft_tail", "base", "valid_len"):
                host[getattr(self, name).storage_offset() + index] = getattr(request, name)
        first = self.move_offsets.storage_offset()
        host[first + 1 : first + 1 + self.batch] = np.cumsum(moves)
        upload_into(self.packed[: len(host)], torch.from_numpy(host))
        return len(requests)

    def _check(self, index: int, request: RequestRound) -> None:
        rows, keep = request.kept.shape
        if rows != self.kept.shape[1] or keep > self.keep_capacity:
            raise ValueError(
                f"requests[{index}].kept: expected shape [{self.kept.shape[1]}, at most {self.keep_capacity}], got [{rows}, {keep}]"
            )
        if keep + request.tail and keep < self.min_keep:
            raise ValueError(f"requests[{index}].kept: expected at least the masked window of {self.min_keep} entries, got {keep}")
        for name in ("tail", "draft_tail"):
            if not 0 <= getattr(request, name) <= self.tail_capacity:
                raise ValueError(f"requests[{index}].{name}: expected 0..{self.tail_capacity}, got {getattr(request, name)}")
        if not 0 <= request.base <= request.base + keep <= request.valid_len:
            raise ValueError(
                f"requests[{index}]: expected 0 <= base and base + keep <= valid_len, "
                f"got base {request.base}, keep {keep}, valid_len {request.valid_len}"
            )


def decision_rows(layout: CacheLayout, row_mode: RowMode) -> int:
    """Rows of kept ordinals a request of this cache has. Raises ValueError where per-head rows would mean different heads."""
    heads = [heads for _, heads in layout.full_layers()]
    if row_mode is RowMode.UNION:
        return 1
    if row_mode is RowMode.PER_LAYER_HEAD:
        return sum(heads)
    if len(set(heads)) != 1:
        raise ValueError(f"row_mode per_head: expected one head count over all full-attention layers, got {sorted(set(heads))}")
    return heads[0]

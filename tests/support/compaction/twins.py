"""The runtime's rounds on two devices in lockstep: the same sequences, decisions, forks and preemptions, and so the same pools.

Needs torch and numpy only: the H200 script uses it too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from runtime_service.compaction.draft import DraftCache
from runtime_service.compaction.policy import KVView, Policy
from runtime_service.compaction.round import Compactor
from runtime_service.core.params import CompactionParams, SamplingParams, StopParams
from runtime_service.core.request import GenerationRequest
from runtime_service.core.sequence import Sequence, Status
from runtime_service.kv.allocator import PageAllocator
from runtime_service.kv.pool import KVPool
from shared.ids import RequestId
from shared.kernels.compaction.modes import Mode, RowMode
from shared.kv_spec import DType, KVCacheSpec, LayerGroup, Layout

FULL = LayerGroup((0, 2), kv_heads=2, head_dim=8, dtype=DType.BFLOAT16)
NARROW = LayerGroup((1,), kv_heads=3, head_dim=16, dtype=DType.FLOAT32)
EVEN = LayerGroup((1,), kv_heads=2, head_dim=16, dtype=DType.FLOAT32)
WINDOWED = LayerGroup((1,), kv_heads=3, head_dim=16, dtype=DType.FLOAT32, window=5)
DRAFT = KVCacheSpec((LayerGroup((0, 1), 1, 8, DType.FLOAT16),), Layout.PAGED, page_size=8, max_len=64)

MAX_SEQUENCES = 6


@dataclass(frozen=True)
class Drawn:
    """Scores by a hash of what it is asked about, so that it reads nothing of any device."""

    rows: RowMode
    num_rows: int
    reads_keys = False

    def score(self, view: KVView) -> torch.Tensor:
        drawn = np.random.default_rng(view.logical_length).random((self.num_rows, view.length), dtype=np.float32)
        return torch.from_numpy(drawn)


class Twin:
    """One device's pools and sequences."""

    def __init__(self, device: torch.device, spec: KVCacheSpec, policy: Policy, mode: Mode, drafted: bool) -> None:
        self.allocator = PageAllocator(60)
        self.pool = KVPool(spec, 60, device)
        draft_pages = MAX_SEQUENCES * DRAFT.max_pages + 1 + MAX_SEQUENCES
        self.draft = DraftCache(KVPool(DRAFT, draft_pages, device), PageAllocator(draft_pages), MAX_SEQUENCES) if drafted else None
        self.pools = [self.pool] if self.draft is None else [self.pool, self.draft.pool]
        for pool in self.pools:
            for tensor in pool.tensors:
                tensor.copy_(torch.arange(tensor.numel(), device=device).view_as(tensor) % 1021)
        self.compactor = Compactor(self.pool, self.allocator, {"drawn": policy}, MAX_SEQUENCES, self.draft)
        params = CompactionParams("drawn", budget=9, interval=8, sinks=1, mode=mode)
        self.request = GenerationRequest(
            RequestId("r"), "e", tuple(range(17)), SamplingParams(temperature=0.0), StopParams(max_tokens=400), params
        )
        self.sequences: list[Sequence] = []

    def add(self) -> None:
        self.sequences.append(Sequence(self.request, 0, len(self.sequences)))
        self.start(self.sequences[-1])

    def start(self, sequence: Sequence) -> None:
        sequence.start()
        if self.draft is not None:
            self.draft.started(sequence)

    def decode(self, sequence: Sequence, tokens: int) -> None:
        """As many more tokens as the round that is due next lets it take; their cells already hold something."""
        taken = min(tokens, sequence.room or 0)
        while sequence.remaining < taken:
            sequence.tokens.append(0)
        if taken:
            missing = self.pool.spec.pages_for(sequence.physical_len + taken) - len(sequence.pages)
            sequence.hold(self.allocator.try_allocate(max(0, missing)) or [])
            sequence.advance(taken)
        if self.draft is not None:
            self.draft.step_ended([s for s in self.sequences if s.status is Status.RUNNING])

    def preempt(self, sequence: Sequence) -> None:
        if self.draft is not None:
            self.draft.ended(sequence)
        self.allocator.release(sequence.preempt())
        self.start(sequence)

    def fork(self, parent: Sequence) -> None:
        """Everything shared, the page the next token goes to included: the round has to copy it."""
        child = Sequence(parent.request, 1, len(self.sequences))
        child.tokens = list(parent.tokens)
        child.fork(parent, self.allocator.share(parent.pages))
        if self.draft is not None:
            self.draft.forked(parent, child)
        self.sequences.append(child)

    def end(self, sequence: Sequence) -> None:
        if self.draft is not None:
            self.draft.ended(sequence)
        self.allocator.release(sequence.finish())
        self.sequences.remove(sequence)

    def due(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.round_is_due]


def specs(mode: Mode) -> dict[str, KVCacheSpec]:
    """Caches that take rounds of this mode."""
    groups = {"full": (FULL, NARROW), "even": (FULL, EVEN)} | ({"windowed": (FULL, WINDOWED)} if mode is Mode.ORDERED else {})
    return {name: KVCacheSpec(of, Layout.PAGED, page_size=4, max_len=64) for name, of in groups.items()}


def policy_for(rows: RowMode, spec: KVCacheSpec) -> Drawn | None:
    """None where heads differ between layers, or a window leaves fewer of them."""
    heads = [group.kv_heads for group in spec.groups if group.window is None]
    if rows is RowMode.PER_HEAD and len(set(heads)) > 1:
        return None
    by_layer = sum(len(group.layers) * group.kv_heads for group in spec.groups if group.window is None)
    return Drawn(rows, {RowMode.UNION: 1, RowMode.PER_HEAD: heads[0], RowMode.PER_LAYER_HEAD: by_layer}[rows])


def step(rng: np.random.Generator, twins: list[Twin]) -> None:
    """One thing that may happen between rounds, to both."""
    count = len(twins[0].sequences)
    what, who = rng.random(), int(rng.integers(max(count, 1)))
    for twin in twins:
        sequence = twin.sequences[who] if count else None
        if sequence is None or (count < MAX_SEQUENCES and what < 0.1):
            twin.add()
        elif count < MAX_SEQUENCES and what < 0.2 and sequence.physical_len:
            twin.fork(sequence)
        elif what < 0.25:
            twin.preempt(sequence)
        elif what < 0.3 and count > 2:
            twin.end(sequence)
        else:
            twin.decode(sequence, 1 + who)


def differing(twins: list[Twin]) -> int:
    """Bytes that differ between the pools, and maps and page lists that do."""
    one, other = twins
    pools = [
        (a.view(torch.uint8), b.view(torch.uint8).to(a.device))
        for left, right in zip(one.pools, other.pools, strict=True)
        for a, b in zip(left.tensors, right.tensors, strict=True)
    ]
    maps = sum(
        a.pages != b.pages or a.positions.tolist() != b.positions.tolist()
        for a, b in zip(one.sequences, other.sequences, strict=True)
    )
    return maps + sum(int((a != b).sum()) for a, b in pools)

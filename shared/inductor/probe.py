"""Try an engine before it is believed: when it has been built, and again when it is loaded.

The probe looks at what an engine may get wrong in silence: writing caches through a copy, writing cells that are not its own,
disagreeing with itself between a prefill and the same tokens decoded one by one. Results are sentences about what is wrong.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from shared.inductor.sample_step import NOISE_CELLS, SampleStep, logits_differ, sample_step, written_cells
from shared.kv_spec import KVCacheSpec
from shared.profiles import OptimizationProfile, Phase, ProfileSet

Run = Callable[[list[Tensor]], Tensor]
"""Inputs in the engine's order, pools last -> logits."""
Make = Callable[..., SampleStep]
"""`sample_step` for one cache, vocabulary and device."""

_TOKENS = 4
"""New tokens of a row in the consistency check: enough to lie on both sides of a page border."""
_POOL_GROWTH = 8


def find_faults(run: Run, cache: KVCacheSpec, profiles: ProfileSet, vocab_size: int, device: str) -> list[str]:
    """Everything wrong with the engine on `device`; empty if nothing was found. Takes about ten steps of the smallest shapes."""
    make = partial(sample_step, cache, vocab_size, device=device)
    try:
        faults = [fault for p in profiles.profiles for fault in _foreign_writes(run, make, cache, p, vocab_size)]
        faults += _copies(run, make, cache, profiles[Phase.DECODE])
        faults += _inconsistency(run, make, cache, profiles)
    except torch.OutOfMemoryError:  # no fault of the engine's
        raise
    except RuntimeError as error:  # what AOTInductor raises when a step does not run
        return [f"a step does not run: {error}"]
    return faults


def without_positions(run: Run) -> Run:
    """A step of an engine that counts positions by its cells, as one that is given them."""
    return lambda inputs: run([inputs[0], *inputs[2:]])


def _foreign_writes(run: Run, make: Make, cache: KVCacheSpec, shape: OptimizationProfile, vocab_size: int) -> Iterator[str]:
    """The new tokens' cells must change, at the caller's addresses, and no other bit of any pool."""
    batch, query_len = shape.batch.min, shape.query_len.min
    step = make(batch=batch, query_len=query_len, start=_start(cache, query_len))
    before = [pool[..., :NOISE_CELLS, :].clone() for pool in step.pools]
    logits = run(step.inputs)
    if logits.shape != (batch, vocab_size) or logits.dtype is not torch.float32 or not torch.isfinite(logits).all():
        yield f"{shape.name}: logits should be finite float32 {[batch, vocab_size]}, they are {logits.dtype} {list(logits.shape)}"
    for layer, (old, new) in enumerate(zip(before, step.pools, strict=True)):
        own = written_cells(cache, step, new)
        same = torch.cat([new[..., :NOISE_CELLS, :] == old, new[..., NOISE_CELLS:, :] == 0], dim=-2)
        if not same[~own].all():
            yield f"{shape.name}: layer {layer} writes cells outside the new tokens'"
        # A vector of random keys or values that comes out as it was, by chance, is out of the question.
        if same.all(dim=-1)[own.all(dim=-1)].any():
            yield f"{shape.name}: layer {layer} leaves cells of new tokens as they were"


def _copies(run: Run, make: Make, cache: KVCacheSpec, shape: OptimizationProfile) -> Iterator[str]:
    """What a step allocates must not depend on the size of the pool."""
    query_len = shape.query_len.min
    base = 1 + shape.batch.min * cache.pages_for(_start(cache, query_len) + query_len)
    allocated = []
    for num_pages in (base, base * _POOL_GROWTH):
        step = make(batch=shape.batch.min, query_len=query_len, start=_start(cache, query_len), num_pages=num_pages)
        run(step.inputs)  # the first call may set up what later ones keep
        count = _allocated_on_gpu if step.pools[0].is_cuda else _allocated_on_host
        allocated.append(count(partial(run, step.inputs)))
    if allocated[0] != allocated[1]:
        yield (
            f"{shape.name}: a step allocates {allocated[0]} bytes on a pool of {base} pages and {allocated[1]} on one "
            f"{_POOL_GROWTH} times as large: it copies caches"
        )


def _inconsistency(run: Run, make: Make, cache: KVCacheSpec, profiles: ProfileSet) -> Iterator[str]:
    """Tokens fed at once and the same tokens fed in the smallest pieces, on other pages, must end in the same logits.

    Their history is the engine's own work: behind noise, rounding in bfloat16 alone can turn a real model's logits around.
    """
    prefill, decode = profiles[Phase.PREFILL], profiles[Phase.DECODE]
    piece = decode.query_len.min
    batch = max(prefill.batch.min, decode.batch.min)
    tokens = max(prefill.query_len.min, min(_TOKENS, prefill.query_len.max, cache.max_len)) // piece * piece
    if not (prefill.admits(batch, tokens) and decode.admits(batch, piece)):
        return
    start = _start(cache, tokens)
    text = make(batch=batch, query_len=start + tokens, start=0)
    for part in _parts(start, prefill, piece):
        run(text.chunk(part).inputs)
    whole = text.chunk(slice(start, start + tokens))
    pieces = _elsewhere(cache, whole)
    wanted = run(whole.inputs)
    for begin in range(0, tokens, piece):
        got = run(pieces.chunk(slice(begin, begin + piece)).inputs)
    if difference := logits_differ(got, wanted, whole.pools[0].dtype):
        yield f"{tokens} tokens fed at once and one by one disagree: {difference}"


def _parts(length: int, prefill: OptimizationProfile, piece: int) -> Iterator[slice]:
    """`length` tokens as prefills; what is too short for one in pieces of a decode step."""
    begin = 0
    while begin < length:
        left = min(length - begin, prefill.query_len.max)
        size = left if left >= prefill.query_len.min else min(left, piece)
        yield slice(begin, begin + size)
        begin += size


def _start(cache: KVCacheSpec, query_len: int) -> int:
    """A history that puts the new tokens across the first page border, or as far back as cache and noise allow."""
    return max(0, min(min(cache.page_size, NOISE_CELLS) - query_len // 2, cache.max_len - query_len))


def _elsewhere(cache: KVCacheSpec, step: SampleStep) -> SampleStep:
    """The same step with every page's content in the next page of another pool, the last page's in page 1."""
    num_pages = step.pools[0].shape[cache.layout.page_dim]
    moved = tuple(torch.zeros_like(pool) for pool in step.pools)
    for old, new in zip(step.pools, moved, strict=True):
        source, target = (pool.movedim(cache.layout.page_dim, 0)[..., :NOISE_CELLS, :] for pool in (old, new))
        target[2:], target[1] = source[1:-1], source[-1]
    table = step.block_table % (num_pages - 1) + 1
    return SampleStep(step.input_ids, step.position_ids, step.write_start, step.last_index, table, moved)


def _allocated_on_gpu(call: Callable[[], object]) -> int:
    """Sum of the device allocations torch makes during `call`, freed ones included."""
    before = torch.cuda.memory_stats()["allocated_bytes.all.allocated"]
    call()
    return int(torch.cuda.memory_stats()["allocated_bytes.all.allocated"] - before)


def _allocated_on_host(call: Callable[[], object]) -> int:
    """Sum of the host allocations torch makes during `call`, freed ones included."""
    # The profiler announces itself on stderr unless its own log level says otherwise when it first starts.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = profiler.profiler.kineto_results.events()
    return sum(event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0)

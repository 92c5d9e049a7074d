"""The probe passes a sound engine and names the fault of every unsound one. Engines here are a few lines of plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shared.inductor.probe import find_faults
from shared.inductor.sample_step import gather_rows, sample_step, scatter_rows, written_cells
from shared.kernels.attention.ops import load_ops
from shared.kv_spec import DType, KVCacheSpec, LayerGroup, Layout
from shared.profiles import ProfileSet, parse_profile

VOCAB, HEADS, KV_HEADS, DIM = 31, 4, 2, 8
PROFILES = ProfileSet((parse_profile("decode=4x1"), parse_profile("prefill=2x16")))
Run = Callable[[list[Tensor]], Tensor]


def spec(layout: Layout, page_size: int = 4, max_len: int = 32) -> KVCacheSpec:
    group = LayerGroup(layers=(0, 1), kv_heads=KV_HEADS, head_dim=DIM, dtype=DType.FLOAT32)
    return KVCacheSpec((group,), layout, page_size if layout is Layout.PAGED else max_len, max_len)


def sound_engine(cache: KVCacheSpec) -> Run:
    """Two attention layers over random projections, through the reference of our op."""
    load_ops()
    generator = torch.Generator().manual_seed(0)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / shape[0] ** 0.5

    width = HEADS * DIM
    embed, head = matrix(VOCAB, width), matrix(width, VOCAB)
    layers = [(matrix(width, width), matrix(width, KV_HEADS * DIM), matrix(width, KV_HEADS * DIM)) for _ in range(cache.num_layers)]

    def run(inputs: list[Tensor]) -> Tensor:
        ids, positions, start, last, table, *pools = inputs
        x = embed[ids.long()] + torch.sin(positions[..., None] * torch.arange(1, width + 1) / width)
        for pool, (wq, wk, wv) in zip(pools, layers, strict=True):
            q, k, v = ((x @ w).unflatten(-1, (-1, DIM)).transpose(1, 2).contiguous() for w in (wq, wk, wv))
            page_dim = cache.layout.page_dim
            out = torch.ops.quire.paged_attend(q, k, v, pool, table, start, page_dim, DIM**-0.5, None, None, None)
            x = x + out.transpose(1, 2).flatten(2)
        return x[torch.arange(len(ids)), last.long()] @ head

    return run


def faults(run: Run, cache: KVCacheSpec) -> str:
    return "; ".join(find_faults(run, cache, PROFILES, VOCAB, "cpu"))


SOUND = {
    "paged": spec(Layout.PAGED),
    "linear": spec(Layout.LINEAR),
    "pages of one": spec(Layout.PAGED, page_size=1),
    "cache of two": spec(Layout.PAGED, max_len=2),
    "longer than the noise": spec(Layout.LINEAR, max_len=300),
}


@pytest.mark.parametrize("cache", SOUND.values(), ids=SOUND)
def test_a_sound_engine_has_no_fault(cache: KVCacheSpec) -> None:
    assert faults(sound_engine(cache), cache) == ""


@pytest.mark.parametrize("layout", list(Layout))
def test_writing_through_a_copy_of_the_pool_is_seen(layout: Layout) -> None:
    """Everything is right in the end, addresses included; only the work grows with the pool."""
    run = sound_engine(spec(layout))

    def copying(inputs: list[Tensor]) -> Tensor:
        copies = [pool.clone() for pool in inputs[5:]]
        logits = run([*inputs[:5], *copies])
        for pool, copy in zip(inputs[5:], copies, strict=True):
            pool.copy_(copy)
        return logits

    assert "it copies caches" in faults(copying, spec(layout))


def test_a_dropped_write_is_seen() -> None:
    run = sound_engine(spec(Layout.PAGED))
    found = faults(lambda inputs: run([*inputs[:5], *(pool.clone() for pool in inputs[5:])]), spec(Layout.PAGED))
    assert "decode: layer 0 leaves cells of new tokens as they were" in found
    assert "prefill: layer 1 leaves cells of new tokens as they were" in found


@pytest.mark.parametrize("layout", list(Layout))
def test_a_write_beside_the_own_cells_is_seen(layout: Layout) -> None:
    """One element of one head of one page, in the last layer."""
    cache = spec(layout)
    run = sound_engine(cache)

    def scribbling(inputs: list[Tensor]) -> Tensor:
        logits = run(inputs)
        inputs[6].movedim(layout.page_dim, 0)[inputs[4][0, 0], 1, 1, 0, 3] += 1
        return logits

    assert "layer 1 writes cells outside the new tokens'" in faults(scribbling, cache)


def test_a_write_far_down_a_linear_row_is_seen() -> None:
    """Beyond the noise, where the pool was zero."""
    cache = spec(Layout.LINEAR, max_len=300)
    run = sound_engine(cache)

    def scribbling(inputs: list[Tensor]) -> Tensor:
        inputs[5][1, 1, 0, 299, 0] = 1
        return run(inputs)

    assert "layer 0 writes cells outside the new tokens'" in faults(scribbling, cache)


def test_positions_that_depend_on_the_query_length_are_seen() -> None:
    """The same token must be rotated alike in a prefill and in a decode."""
    run = sound_engine(spec(Layout.PAGED))

    def shifted(inputs: list[Tensor]) -> Tensor:
        return run([inputs[0], inputs[1] + (inputs[0].shape[1] == 1), *inputs[2:]])

    assert "disagree" in faults(shifted, spec(Layout.PAGED))


def test_reading_pages_past_the_block_table_is_seen() -> None:
    """Attention over the pool's own order, not over the table's: right only for a sequence that lies in order."""
    cache = spec(Layout.PAGED)
    run = sound_engine(cache)

    def unmapped(inputs: list[Tensor]) -> Tensor:
        logits = run(inputs)
        return logits + inputs[5][1].sum()

    assert "disagree" in faults(unmapped, cache)


def test_an_answer_that_is_not_finite_is_seen() -> None:
    """BR-027."""
    run = sound_engine(spec(Layout.PAGED))
    assert "logits should be finite" in faults(lambda inputs: run(inputs) * float("nan"), spec(Layout.PAGED))


def test_an_answer_of_another_batch_is_seen() -> None:
    """BR-030: rows of an earlier, larger step."""
    run = sound_engine(spec(Layout.PAGED))
    assert "logits should be finite float32 [1, 31]" in faults(lambda inputs: run(inputs).repeat(2, 1), spec(Layout.PAGED))


@pytest.mark.parametrize("layout", list(Layout))
def test_sample_steps_describe_their_own_cells(layout: Layout) -> None:
    """`written_cells` against the rows read back through the block table, with a run that crosses a page border."""
    cache = spec(layout)
    step = sample_step(cache, VOCAB, batch=2, query_len=3, start=2, num_pages=9)
    assert len(set(step.block_table.flatten().tolist())) == step.block_table.numel()
    assert 0 not in step.block_table
    mask = written_cells(cache, step, step.pools[0])
    assert int(mask.sum()) == 2 * 3 * 2 * KV_HEADS * DIM
    k, v = gather_rows(cache, mask, step.block_table, 6)
    expected = torch.tensor([False, False, True, True, True, False])[:, None]
    assert torch.equal(k, expected.expand(2, KV_HEADS, 6, DIM))
    assert torch.equal(v, k)


@pytest.mark.parametrize("layout", list(Layout))
def test_scattered_rows_are_gathered_again_and_nothing_else_changes(layout: Layout) -> None:
    cache = spec(layout)
    step = sample_step(cache, VOCAB, batch=2, query_len=6, start=0, num_pages=9)
    pool, before = step.pools[0], step.pools[0].clone()
    keys, values = torch.randn(2, 2, KV_HEADS, 5, DIM)
    scatter_rows(cache, pool, step.block_table, keys, values)
    got_keys, got_values = gather_rows(cache, pool, step.block_table, 5)
    assert torch.equal(got_keys, keys)
    assert torch.equal(got_values, values)
    cells = written_cells(cache, step.chunk(slice(0, 5)), pool)
    assert torch.equal(pool[~cells], before[~cells])

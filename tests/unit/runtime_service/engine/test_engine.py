"""Compiled engines, loaded from a store as the runtime loads them, say what `transformers` says and touch what is theirs.

Gemma 3 (sliding and full layers) over pages, Llama over rows: one engine a layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from runtime_service.engine.engine import Engine, EngineInputs
from runtime_service.engine.loader import EngineLoader
from runtime_service.kv.pool import KVPool
from shared.errors import EngineIncompatible, FieldOutOfRange, InternalError
from shared.kv_spec import Layout
from tests.support.decoder_steps import JUNK, Rows, greedy_rows, pages_needed, scattered_table
from tests.support.decoders import greedy, last_logits, random_prompt
from tests.support.engines import TinyEngine, tiny_engine

PROMPTS = [random_prompt(length, seed=length) for length in (11, 3, 7)]


@pytest.fixture(scope="module", params=[("gemma3", Layout.PAGED), ("llama", Layout.LINEAR)], ids=["paged", "linear"])
def tiny(request: pytest.FixtureRequest) -> TinyEngine:
    return tiny_engine(*request.param)


@pytest.fixture(scope="module")
def engine(tiny: TinyEngine) -> Iterator[Engine]:
    engine = EngineLoader().load(tiny.store.open(tiny.engine_id), tiny.store.open(tiny.model_id))
    yield engine
    engine.close()


class Serving:
    """An engine over one pool of junk, fed as the runtime feeds it."""

    def __init__(self, engine: Engine, batch: int) -> None:
        self.engine = engine
        cache = engine.manifest.cache
        self.pool = KVPool(cache, pages_needed(cache, batch))
        for tensor in self.pool.tensors:
            tensor.fill_(JUNK)
        self.table = scattered_table(cache, batch, self.pool.num_pages)
        self.rows = Rows(self._feed, batch)

    def inputs(self, ids: Tensor, positions: Tensor, start: Tensor, last: Tensor) -> EngineInputs:
        profile = "decode" if ids.shape[1] == 1 else "prefill"
        return EngineInputs(profile, ids, positions, start, last, self.table)

    def _feed(self, ids: Tensor, positions: Tensor, start: Tensor, last: Tensor) -> Tensor:
        return self.engine.run(self.inputs(ids, positions, start, last), self.pool)


def test_ragged_batches_equal_transformers(tiny: TinyEngine, engine: Engine) -> None:
    """Padded prefill of three prompts, then 20 tokens each: the same tokens as `generate`, one prompt at a time."""
    wanted = [greedy(tiny.model, prompt, 20) for prompt in PROMPTS]
    assert greedy_rows(Serving(engine, 3).rows, PROMPTS, 20) == wanted


def test_a_sequence_fed_alone_in_uneven_chunks_equals_transformers(tiny: TinyEngine, engine: Engine) -> None:
    serving, prompt, fed = Serving(engine, 1), random_prompt(40, seed=3), 0
    for count in (1, 16, 1, 1, 21):
        logits = serving.rows.step([prompt[fed : fed + count]])
        fed += count
        torch.testing.assert_close(logits[0], last_logits(tiny.model, prompt[:fed]), rtol=1e-3, atol=1e-3)


def test_steps_change_the_caller_s_memory_and_only_new_cells(engine: Engine) -> None:
    """BR-011, BR-029: the second call reads what the first one wrote, at the same addresses; all other cells keep their bits."""
    serving = Serving(engine, 2)
    addresses = [tensor.data_ptr() for tensor in serving.pool.tensors]
    for step, tokens in enumerate(([[5, 6, 7], [8, 9, 10]], [[11], [12]], [[13], [14]])):
        before = [tensor.clone() for tensor in serving.pool.tensors]
        cells = {(row, serving.rows.lengths[row] + i) for row in range(2) for i in range(len(tokens[row]))}
        serving.rows.step(tokens)
        for layer, (old, new) in enumerate(zip(before, serving.pool.tensors, strict=True)):
            changed = (
                (old != new).movedim(engine.manifest.cache.layout.page_dim, 0).any(dim=1).any(dim=1).any(dim=-1).nonzero().tolist()
            )
            size = engine.manifest.cache.page_size
            expected = sorted([int(serving.table[row, at // size]), at % size] for row, at in cells)
            assert sorted(changed) == expected, (step, layer)
    assert [tensor.data_ptr() for tensor in serving.pool.tensors] == addresses


def test_a_new_sequence_sees_nothing_of_the_last(engine: Engine) -> None:
    """BR-010: nothing is kept but what the pool holds."""
    serving = Serving(engine, 1)
    fresh = serving.rows.step([[9, 4]])
    for token in (5, 6, 7):
        serving.rows.step([[token]])
    again = Serving(engine, 1)
    assert torch.equal(again.rows.step([[9, 4]]), fresh)


def test_padding_rows_change_nothing(engine: Engine) -> None:
    """BR-027: rows that belong to nobody write to the dump page; real rows are as without them, and nothing becomes NaN."""
    serving = Serving(engine, 2)
    alone = serving.rows.step([[5], [6]])
    padded = Serving(engine, 2)
    step = padded.inputs(*(torch.tensor(v, dtype=torch.int32) for v in ([[5], [6], [0], [0]], [[0]] * 4, [0] * 4, [0] * 4)))
    table = torch.cat([padded.table, torch.zeros_like(padded.table)])
    logits = engine.run(replace(step, block_table=table), padded.pool)
    torch.testing.assert_close(logits[:2], alone, rtol=1e-5, atol=1e-5)
    assert logits.isfinite().all()
    assert all(tensor.isfinite().all() for tensor in padded.pool.tensors)


def test_a_smaller_batch_after_a_larger_one_gives_its_own_rows(engine: Engine) -> None:
    """BR-030: three rows of logits after a step of four, each its own."""
    four = Serving(engine, 4)
    four.rows.step([[token] for token in (5, 6, 7, 8)])
    three = Serving(engine, 3)
    logits = three.rows.step([[6], [7], [8]])
    assert logits.shape == (3, engine.manifest.model.vocab_size)
    again = Serving(engine, 3)
    assert torch.equal(again.rows.step([[6], [7], [8]]), logits)


def test_a_bad_step_is_refused_and_changes_nothing(engine: Engine) -> None:
    serving = Serving(engine, 1)
    before = [tensor.clone() for tensor in serving.pool.tensors]
    vocab = engine.manifest.model.vocab_size
    with pytest.raises(FieldOutOfRange, match="input_ids"):
        serving.rows.step([[vocab]])
    assert all(torch.equal(old, new) for old, new in zip(before, serving.pool.tensors, strict=True))


def test_a_pool_of_another_engine_is_refused_even_after_a_good_one(engine: Engine) -> None:
    serving = Serving(engine, 1)
    serving.rows.step([[5]])
    cache = engine.manifest.cache
    longer = cache.max_len + cache.page_size
    page_size = longer if cache.layout is Layout.LINEAR else cache.page_size
    serving.pool = KVPool(replace(cache, max_len=longer, page_size=page_size), 4)
    with pytest.raises(EngineIncompatible, match="the pool holds"):
        serving.rows.step([[5]])


def test_engines_of_one_model_share_its_weights(tiny: TinyEngine) -> None:
    """A change of the mapped weights reaches both engines: neither has a copy."""
    loader = EngineLoader()
    first, second = (loader.load(tiny.store.open(tiny.engine_id), tiny.store.open(tiny.model_id)) for _ in range(2))
    try:
        one, two = Serving(first, 1).rows.step([[5]]), Serving(second, 1).rows.step([[5]])
        assert torch.equal(one, two)
        weights = loader._weights.get(tiny.model_id, tiny.store.open(tiny.model_id).path("weights.safetensors"))
        weights.tensors["model.norm.weight"].mul_(0).add_(-1 if "gemma" in tiny.model.config.model_type else 0)
        assert not Serving(first, 1).rows.step([[5]]).any()
        assert not Serving(second, 1).rows.step([[5]]).any()
    finally:
        first.close()
        second.close()


def test_a_closed_engine_does_not_run_and_gives_its_artifacts_back(tiny: TinyEngine) -> None:
    engine = EngineLoader().load(tiny.store.open(tiny.engine_id), tiny.store.open(tiny.model_id))
    serving = Serving(engine, 1)
    engine.close()
    engine.close()
    with pytest.raises(InternalError, match="closed"):
        serving.rows.step([[5]])

"""Every input that would end the process or reach into a neighbour's cells is refused on the host, naming the input."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from runtime_service.engine.bindings import check_inputs, check_pool
from runtime_service.engine.engine import EngineInputs
from runtime_service.kv.pool import KVPool
from shared.bindings import POSITION_IDS, BindingSpec, Role
from shared.errors import EngineIncompatible, FieldOutOfRange
from shared.kv_spec import DType, KVCacheSpec, LayerGroup, Layout
from shared.manifest import SCHEMA_VERSION, EngineManifest, ModelFacts, Target
from shared.profiles import OptimizationProfile, ProfileSet, Range, parse_profile

VOCAB, MAX_POSITION, NUM_PAGES = 50, 200, 30


def manifest(layout: Layout = Layout.PAGED) -> EngineManifest:
    """Pages of 4, up to 5 a sequence; decode 4x1, prefill batch 1..2 of 2..8 tokens."""
    group = LayerGroup(layers=(0, 1), kv_heads=2, head_dim=8, dtype=DType.FLOAT32)
    facts = ModelFacts("m" * 64, "tiny", "LlamaForCausalLM", VOCAB, 2, 4, MAX_POSITION, None, (1,), "float32", 1)
    prefill = OptimizationProfile("prefill", Range(1, 2, 2), Range(2, 8, 8))
    return EngineManifest(
        schema_version=SCHEMA_VERSION,
        artifact_id="e" * 64,
        kind="engine",
        model=facts,
        cache=KVCacheSpec((group,), layout, 4 if layout is Layout.PAGED else 20, 20),
        profiles=ProfileSet((parse_profile("decode=4x1"), prefill)),
        bindings=(BindingSpec(POSITION_IDS, Role.INPUT, "int32", (None, None)),),
        aliases=(),
        backend="inductor",
        target=Target("cpu", (), ()),
        toolchain={},
        constants={},
        proof=(),
        key_components={},
        files=(),
    )


def inputs(batch: int = 2, query_len: int = 8, width: int = 3, start: int = 4) -> EngineInputs:
    """A step that is in order: rows of `start` entries and `width` pages."""
    return EngineInputs(
        profile="decode" if query_len == 1 else "prefill",
        input_ids=torch.full((batch, query_len), VOCAB - 1, dtype=torch.int32),
        position_ids=(start + torch.arange(query_len, dtype=torch.int32)).repeat(batch, 1),
        write_start=torch.full((batch,), start, dtype=torch.int32),
        last_index=torch.full((batch,), query_len - 1, dtype=torch.int32),
        block_table=torch.arange(1, 1 + batch * width, dtype=torch.int32).view(batch, width),
    )


def changed(tensor: Tensor, value: int) -> Tensor:
    """A copy whose last element is `value`."""
    tensor = tensor.clone()
    tensor.view(-1)[-1] = value
    return tensor


@pytest.mark.parametrize(
    "step",
    [
        inputs(),
        inputs(batch=1, query_len=2, width=1, start=2),  # ends on the last cell of its only page
        inputs(batch=4, query_len=1, width=5, start=19),  # the last cell of a full sequence
        replace(inputs(), position_ids=changed(inputs().position_ids, MAX_POSITION - 1)),
        replace(inputs(), block_table=changed(inputs().block_table, NUM_PAGES - 1)),
        replace(inputs(), block_table=changed(inputs().block_table, 0)),  # not mapped: the dump page
    ],
)
def test_a_step_in_order_passes(step: EngineInputs) -> None:
    check_inputs(step, manifest(), NUM_PAGES)


def test_an_engine_that_rotates_by_cells_takes_no_other_positions() -> None:
    """After a compaction positions and cells part ways; such an engine would rotate by the wrong ones."""
    without = replace(manifest(), bindings=())
    check_inputs(inputs(), without, NUM_PAGES)
    with pytest.raises(FieldOutOfRange, match="position_ids must be the cells written") as caught:
        check_inputs(replace(inputs(), position_ids=inputs().position_ids + 1), without, NUM_PAGES)
    assert caught.value.field == "position_ids"


OUT_OF_RANGE = {
    "token id at the vocabulary's end": ("input_ids", VOCAB),
    "negative token id": ("input_ids", -1),
    "negative position": ("position_ids", -1),
    "position at the model's end": ("position_ids", MAX_POSITION),
    "negative start": ("write_start", -1),
    "start one too far": ("write_start", 5),  # 5 + 8 tokens over 3 pages of 4
    "negative row index": ("last_index", -1),
    "row index past the new tokens": ("last_index", 8),
    "negative page": ("block_table", -1),
    "page past the pool": ("block_table", NUM_PAGES),
}


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE.values(), ids=OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused(name: str, value: int) -> None:
    """Only the last element is bad; generated code would abort, wrap or write past the row."""
    step = inputs()
    with pytest.raises(FieldOutOfRange, match=rf"{name} must lie in 0\.\.\d+; got {value}$") as caught:
        check_inputs(replace(step, **{name: changed(getattr(step, name), value)}), manifest(), NUM_PAGES)
    assert caught.value.field == name


@pytest.mark.parametrize("name", ["input_ids", "position_ids", "write_start", "last_index", "block_table"])
def test_another_dtype_shape_or_stride_is_refused(name: str) -> None:
    step = inputs()
    tensor: Tensor = getattr(step, name)
    wrong = [tensor.long(), tensor[:1], tensor.repeat_interleave(2, -1)[..., ::2]]
    for bad in wrong:
        with pytest.raises(FieldOutOfRange):
            check_inputs(replace(step, **{name: bad}), manifest(), NUM_PAGES)


@pytest.mark.parametrize(
    ("step", "field"),
    [
        (inputs(batch=3, query_len=8), ""),  # prefill takes two rows
        (replace(inputs(batch=4, query_len=1), profile="prefill"), ""),  # prefill takes at least two tokens
        (replace(inputs(), profile="decode"), ""),
        (replace(inputs(), profile="verify"), "profile"),
        (replace(inputs(), input_ids=torch.zeros(16, dtype=torch.int32)), "input_ids"),
        (inputs(width=6), "block_table"),  # a sequence has at most five pages
        (replace(inputs(), block_table=torch.zeros(2, 0, dtype=torch.int32)), "block_table"),
        (inputs(width=1), "block_table"),  # eight tokens do not fit into one page
    ],
)
def test_a_shape_the_engine_was_not_built_for_is_refused(step: EngineInputs, field: str) -> None:
    """BR-022: the message of a profile mismatch lists what the engine has."""
    with pytest.raises(FieldOutOfRange) as caught:
        check_inputs(step, manifest(), NUM_PAGES)
    assert caught.value.field == field
    if not field:
        assert "decode batch 1..4 length 1..1, prefill batch 1..2 length 2..8" in caught.value.message


def test_a_linear_row_may_not_be_written_past_its_end() -> None:
    """One slot of 20 cells: 13 + 8 would run into the next slot."""
    step = replace(inputs(width=1, start=12), block_table=torch.tensor([[1], [2]], dtype=torch.int32))
    check_inputs(step, manifest(Layout.LINEAR), NUM_PAGES)
    with pytest.raises(FieldOutOfRange, match=r"write_start must lie in 0\.\.12; got 13"):
        check_inputs(replace(step, write_start=changed(step.write_start, 13)), manifest(Layout.LINEAR), NUM_PAGES)


def test_a_pool_of_another_geometry_is_refused() -> None:
    check_pool(KVPool(manifest().cache, NUM_PAGES), manifest())
    with pytest.raises(EngineIncompatible, match="the pool holds"):
        check_pool(KVPool(manifest(Layout.LINEAR).cache, NUM_PAGES), manifest())


def test_a_pool_whose_tensors_are_not_what_it_says_is_refused() -> None:
    """BR-008: a tensor of another shape, or a view, is caught before the first step."""
    for change in (lambda t: t[:-1], lambda t: t.transpose(2, 3).contiguous().transpose(2, 3), lambda t: t.double()):
        pool = KVPool(manifest().cache, NUM_PAGES)
        pool.tensors = (pool.tensors[0], change(pool.tensors[1]))
        with pytest.raises(EngineIncompatible, match="pool of layer 1") as caught:
            check_pool(pool, manifest())
        assert caught.value.details["field"] == "kv_pool.1"

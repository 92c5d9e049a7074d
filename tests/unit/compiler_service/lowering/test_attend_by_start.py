"""Stock exports of `transformers` over pools: their masked attention becomes ours where it is the same, else it is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from compiler_service.export.program import DecoderProgram
from compiler_service.ingest.program_caches import cache_values, find_caches
from compiler_service.lowering.adopt import adopt_program
from compiler_service.lowering.lower import lower_to_linear, lower_to_pools
from compiler_service.lowering.passes.attend_by_start import attend_by_start
from compiler_service.proof.decoder import prove_decoder, read_proven_layers
from shared.errors import UnsupportedModel
from shared.kv_spec import DType, KVCacheSpec, LayerGroup, Layout
from shared.profiles import ProfileSet, parse_profile
from tests.support.decoder_steps import int32, junk_pools, pages_needed, scattered_table
from tests.support.decoders import WINDOW, last_logits, random_model, random_prompt, tiny_config
from tests.support.families import family_config, family_model
from tests.support.stock_export import export_stock

MAX_LEN, LONGEST, PAGE_SIZE = 24, 8, 4
PROFILES = ProfileSet(tuple(map(parse_profile, ("decode=1x1", f"prefill=1x{LONGEST}"))))


def adopt(exported: torch.export.ExportedProgram, layout: Layout) -> DecoderProgram:
    functional = exported.run_decompositions({})
    layers = find_caches(functional)
    k = cache_values(functional, layers)[layers[0].k]
    group = LayerGroup(tuple(range(len(layers))), int(k.shape[1]), int(k.shape[3]), DType.FLOAT32)
    page_size = PAGE_SIZE if layout is Layout.PAGED else MAX_LEN
    return adopt_program(functional, layers, KVCacheSpec((group,), layout, page_size, MAX_LEN), PROFILES)


def over_pools(program: DecoderProgram) -> DecoderProgram:
    linear = lower_to_linear(program)
    report = prove_decoder(program, linear)
    report.require()
    return lower_to_pools(attend_by_start(linear, read_proven_layers(linear, report)), report.proven_nodes)


def gemma3() -> PreTrainedModel:
    model = random_model(tiny_config("gemma3"))
    model.set_attn_implementation("sdpa")
    return model


MODELS: dict[str, tuple[Callable[[], PreTrainedModel], list[int | None]]] = {
    "windows": (gemma3, [WINDOW, None, WINDOW]),
    "one head for all": (lambda: family_model(family_config("falcon")), [None, None]),
    "positions added": (lambda: family_model(family_config("gpt2")), [None, None]),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", list(Layout))
def test_a_stock_export_runs_over_pools(name: str, layout: Layout) -> None:
    """BR-020: prefill, then decode past every window, on scattered pages of junk."""
    make, windows = MODELS[name]
    model = make()
    program = over_pools(adopt(export_stock(model, MAX_LEN, LONGEST), layout))
    assert [group.window for _, group in program.cache.iter_layers()] == windows
    module = program.program.module(check_guards=False)
    num_pages = pages_needed(program.cache, 1)
    pools, table = junk_pools(program.cache, num_pages), scattered_table(program.cache, 1, num_pages)
    tokens = random_prompt(14, seed=4)
    for start, end in ((0, 7), *((at, at + 1) for at in range(7, 14))):
        got = module(int32([tokens[start:end]]), int32([start]), int32([end - start - 1]), table, *pools)
        torch.testing.assert_close(got[0], last_logits(model, tokens[:end]), atol=2e-3, rtol=1e-3)


HEADS, DIM = 2, 4
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""queries, keys, values, cells, positions -> attended."""


class _Layer(nn.Module):
    """One layer whose queries, keys and values are the tokens themselves."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.register_buffer("key_cache", torch.zeros(1, HEADS, MAX_LEN, DIM))
        self.register_buffer("value_cache", torch.zeros(1, HEADS, MAX_LEN, DIM))

    def forward(self, input_ids: Tensor, start: Tensor) -> Tensor:
        rows = input_ids[:, None, :, None].float().expand(-1, HEADS, -1, DIM)
        positions = torch.arange(input_ids.shape[1]) + start
        self.key_cache.index_copy_(2, positions, rows)
        self.value_cache.index_copy_(2, positions, rows)
        cells = torch.arange(MAX_LEN)
        return self.attend(rows, self.key_cache, self.value_cache, cells[None, :], positions[:, None]).sum(1)


def _products(q: Tensor, k: Tensor, v: Tensor, cells: Tensor, positions: Tensor) -> Tensor:
    scores = (q @ k.transpose(-1, -2)).masked_fill(cells > positions, -1e9)
    return scores.softmax(-1) @ v


def _in_chunks(q: Tensor, k: Tensor, v: Tensor, cells: Tensor, positions: Tensor) -> Tensor:
    mask = (cells <= positions) & (cells // 8 == positions // 8)
    return scaled_dot_product_attention(q, k, v, mask)


def _of_other_heads(q: Tensor, k: Tensor, v: Tensor, cells: Tensor, positions: Tensor) -> Tensor:
    both = k[:, :, None].expand(-1, -1, 2, -1, -1).transpose(1, 2).reshape(1, 2 * HEADS, MAX_LEN, DIM)
    return scaled_dot_product_attention(q.repeat_interleave(2, 1), both, v.repeat_interleave(2, 1), cells <= positions)


@pytest.mark.parametrize(
    ("attend", "told"),
    [
        (_products, r"its attentions are softmax.* attn_implementation='sdpa'"),
        (_in_chunks, "sees the cells of its own chunk of 8 alone: compile the checkpoint"),
        (_of_other_heads, r"reads k_cache\.0 through .*, which is more than its heads repeated"),
    ],
)
def test_another_attention_is_refused_with_what_to_do(attend: Attend, told: str) -> None:
    """Proven all the same: TensorRT takes each of them."""
    inputs = (torch.zeros(1, 5, dtype=torch.int64), torch.tensor(0))
    exported = export(_Layer(attend), inputs, dynamic_shapes=({1: Dim("length", min=1, max=LONGEST)}, None), strict=False)
    program = adopt(exported, Layout.PAGED)
    assert prove_decoder(program, lower_to_linear(program)).ok
    with pytest.raises(UnsupportedModel, match=told):
        over_pools(program)

"""The exported linear program says what `transformers` says, for ragged batches, junk in the caches and compacted rows."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.export.graph_signature import InputKind
from transformers import DynamicCache

from compiler_service.export.geometry import cache_spec
from compiler_service.export.program import DecoderProgram, export_decoder
from shared.bindings import INPUT_IDS
from shared.errors import FieldOutOfRange
from shared.kv_spec import DType, Layout
from shared.profiles import ProfileSet, parse_profile
from tests.support.decoder_steps import LinearCaches, Rows, feed_linear, greedy_rows
from tests.support.decoders import FAMILIES, WINDOW, greedy, last_logits, random_model, random_prompt, tiny_config

Export = Callable[[str, Layout], DecoderProgram]


def rows_of(program: DecoderProgram, model: torch.nn.Module, batch: int, max_len: int = 40) -> tuple[Rows, LinearCaches]:
    caches = LinearCaches(program.cache, batch, max_len)
    return Rows(feed_linear(program, model.state_dict(), caches), batch), caches


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_prefill_and_decode_equal_transformers(exported: Export, family: str) -> None:
    """Three prompts of different length in one padded prefill, then decode; BR-020: junk in unwritten cells never counts.

    BR-085: a row's tokens do not depend on the lengths of its neighbours.
    """
    model = random_model(tiny_config(family))
    rows, _ = rows_of(exported(family, Layout.PAGED), model, batch=3)
    prompts = [random_prompt(length, seed=length) for length in (11, 3, 7)]
    assert greedy_rows(rows, prompts, 12) == [greedy(model, prompt, 12) for prompt in prompts]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_a_forward_without_a_cache(exported: Export, family: str) -> None:
    """One row, fed in chunks of 1, 9 and 2: batch and query length are both free, down to 1 (BR-025)."""
    model = random_model(tiny_config(family))
    rows, _ = rows_of(exported(family, Layout.PAGED), model, batch=1)
    prompt = random_prompt(12, seed=1)
    fed = 0
    for count in (1, 9, 2):
        logits = rows.step([prompt[fed : fed + count]])
        fed += count
        torch.testing.assert_close(logits[0], last_logits(model, prompt[:fed]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_positions_are_logical_and_cells_physical(exported: Export, family: str) -> None:
    """After cells 2 and 5 of 9 are dropped the next token is written at 7 and rotated as position 9.

    The oracle is `transformers` with the same two entries taken out of its own cache.
    """
    model = random_model(tiny_config(family))
    rows, caches = rows_of(exported(family, Layout.PAGED), model, batch=1)
    prompt, kept = random_prompt(9, seed=2), [0, 1, 3, 4, 6, 7, 8]
    rows.step([prompt])
    for tensor in (*caches.k, *caches.v):
        tensor[:, :, : len(kept)] = tensor[:, :, kept].clone()
    rows.lengths = [len(kept)]
    got = rows.step([[5]])

    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.tensor([prompt]), cache=cache)
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
        wanted = model(input_ids=torch.tensor([[5]]), position_ids=torch.tensor([[9]]), cache=cache).logits[:, -1]
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_a_cache_row_holds_what_was_written_and_nothing_else_changes(exported: Export) -> None:
    """BR-016: exact cells by value, with query_len == kv_heads, where a swap of the two axes has no shape to show."""
    program = exported("llama", Layout.PAGED)
    model = random_model(tiny_config("llama"))
    rows, caches = rows_of(program, model, batch=2)
    rows.lengths = [3, 9]
    before = [tensor.clone() for tensor in (*caches.k, *caches.v)]
    tokens = [random_prompt(2, seed=3), random_prompt(2, seed=4)]
    rows.step(tokens)
    attention = model.model.layers[0].self_attn
    hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(torch.tensor(tokens)))
    values = attention.v_proj(hidden).view(2, 2, 2, 16)  # [row, token, head, head_dim]
    for row, start in enumerate((3, 9)):
        for token in range(2):
            torch.testing.assert_close(caches.v[0][row, :, start + token], values[row, token], rtol=1e-5, atol=1e-5)
    for old, new in zip(before, (*caches.k, *caches.v), strict=True):
        for row, start in enumerate((3, 9)):
            outside = [cell for cell in range(40) if not start <= cell < start + 2]
            assert torch.equal(old[row, :, outside], new[row, :, outside])


def test_nothing_of_one_sequence_stays_in_the_program(exported: Export) -> None:
    """BR-010: after any use, fresh caches give exactly the logits of a fresh program."""
    model = random_model(tiny_config("llama"))
    first, _ = rows_of(exported("llama", Layout.PAGED), model, batch=1)
    fresh = first.step([[9]])
    for token in (5, 6, 7):
        first.step([[token]])
    again, _ = rows_of(exported("llama", Layout.PAGED), model, batch=1)
    assert torch.equal(again.step([[9]]), fresh)


def test_sliding_layers_are_named_with_their_window(exported: Export) -> None:
    """BR-018: the kind and the order of layers survive the export."""
    program = exported("gemma3", Layout.PAGED)
    assert [program.cache.group_of(layer).window for layer in range(3)] == [WINDOW, None, WINDOW]
    attends = program.program.graph.find_nodes(op="call_function", target=torch.ops.quire.attend.default)
    assert [node.args[5] for node in attends] == [WINDOW, None, WINDOW]


def test_a_window_over_the_whole_cache_is_no_window() -> None:
    """BR-079: windows of at least max_len share the group of full attention, one of max_len - 1 does not."""
    config = tiny_config("gemma3")
    groups = {
        max_len: cache_spec(config, DType.FLOAT32, Layout.PAGED, 4, max_len).groups for max_len in (WINDOW - 1, WINDOW, WINDOW + 1)
    }
    assert [len(groups[max_len]) for max_len in (WINDOW - 1, WINDOW, WINDOW + 1)] == [1, 1, 2]


def test_ranges_are_those_of_the_profiles(exported: Export) -> None:
    """BR-025: batch 1..4 and query length 1..32 are what the program stores, and no size is a constant."""
    program = exported("llama", Layout.PAGED).program
    tokens = next(node for node in program.graph.find_nodes(op="placeholder") if node.name == INPUT_IDS)
    stored = [program.range_constraints[size.node.expr] for size in tokens.meta["val"].shape]
    assert [(bounds.lower, bounds.upper) for bounds in stored] == [(1, 4), (1, 32)]


def test_one_sequence_and_one_token_are_a_valid_request() -> None:
    """The smallest profiles there are: torch.export would take a sample of 1 for a constant."""
    profiles = ProfileSet((parse_profile("decode=1x1"), parse_profile("prefill=1x1")))
    config = tiny_config("llama")
    program = export_decoder(config, cache_spec(config, DType.FLOAT32, Layout.PAGED, 4, 16), profiles)
    model = random_model(config)
    rows, _ = rows_of(program, model, batch=1, max_len=16)
    torch.testing.assert_close(rows.step([[5]])[0], last_logits(model, [5]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_all_inputs_share_one_batch_size(rows: int) -> None:
    """With a size of its own for each cache, no write could be proven to cover its cache's rows."""
    profiles = ProfileSet((parse_profile(f"decode={rows}x1"), parse_profile(f"prefill={rows}x8")))
    config = tiny_config("llama")
    spec = cache_spec(config, DType.FLOAT32, Layout.LINEAR, 16, 16)
    for static_cache in (False, True):
        program = export_decoder(config, spec, profiles, static_cache=static_cache)
        placeholders = {node.name: node.meta["val"] for node in program.program.graph.find_nodes(op="placeholder")}
        assert len({str(placeholders[name].shape[0]) for name in program.inputs}) == 1
        lengths = {str(placeholders[program.placeholder(name)].shape[2]) for name in ("k_cache.0", "v_cache.1")}
        assert (lengths == {"16"}) is static_cache


def test_a_profile_longer_than_the_cache_is_refused() -> None:
    config = tiny_config("llama")
    profiles = ProfileSet((parse_profile("decode=1x1"), parse_profile("prefill=1x17")))
    with pytest.raises(FieldOutOfRange, match=r"17 tokens a row into caches of 16"):
        export_decoder(config, cache_spec(config, DType.FLOAT32, Layout.PAGED, 4, 16), profiles)


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen3", False), ("gemma3", True)])
def test_weights_are_named_as_the_checkpoint_names_them(exported: Export, family: str, tied: bool) -> None:
    """Every parameter is bound by name, a tied head to the embedding, and none of them is a constant of the program."""
    program = exported(family, Layout.PAGED)
    parameters = [spec.target for spec in program.program.graph_signature.input_specs if spec.kind is InputKind.PARAMETER]
    assert sorted(program.weights) == sorted(str(name) for name in parameters)
    model = random_model(tiny_config(family))
    stored = {name for name in model.state_dict() if not (tied and name == "lm_head.weight")}
    assert set(program.weights.values()) == stored
    assert not program.weights.keys() & program.constants.keys()


def test_exporting_allocates_no_weights() -> None:
    """A model of 12 GB exports in a process that could not hold it: parameters are never touched."""
    config = tiny_config("llama")
    config.vocab_size = 1 << 24
    config.hidden_size = 192
    profiles = ProfileSet((parse_profile("decode=1x1"), parse_profile("prefill=1x4")))
    program = export_decoder(config, cache_spec(config, DType.FLOAT32, Layout.PAGED, 4, 16), profiles)
    (embedding,) = [value for name, value in program.program.state_dict.items() if name.endswith("lm_head.weight")]
    assert embedding.nbytes == 192 * (1 << 24) * 4
    assert _resident_bytes() < embedding.nbytes // 2


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_bfloat16_programs_answer_in_float32(exported: Export) -> None:
    config = tiny_config("llama")
    program = export_decoder(
        config, cache_spec(config, DType.BFLOAT16, Layout.PAGED, 8, 48), exported("llama", Layout.PAGED).profiles
    )
    model = random_model(config, dtype=torch.bfloat16)
    rows, caches = rows_of(program, model, batch=1)
    prompt = random_prompt(10, seed=6)
    logits = rows.step([prompt])
    assert logits.dtype is torch.float32
    assert caches.k[0].dtype is torch.bfloat16
    assert torch.cosine_similarity(logits[0], last_logits(model, prompt), dim=0) > 0.99

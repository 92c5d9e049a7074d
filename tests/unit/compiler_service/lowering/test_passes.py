"""Each pass keeps what the step computes and changes what it says it changes; what cannot be paged is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import fx
from torch.export.graph_signature import ExportGraphSignature, InputKind, OutputSpec, TensorArgument

from compiler_service.export.program import DecoderProgram
from compiler_service.lowering.lower import lower_to_linear, lower_to_pools
from compiler_service.lowering.passes.canonical_order import canonical_order
from compiler_service.lowering.passes.functionalize import functionalize
from compiler_service.lowering.passes.group_linears import group_linears
from compiler_service.lowering.passes.page_caches import page_caches
from compiler_service.lowering.passes.remove_dead_inputs import remove_dead_inputs
from compiler_service.lowering.passes.take_sizes_from_tokens import take_sizes_from_tokens
from compiler_service.lowering.rewrite import rebuild
from compiler_service.proof.decoder import prove_decoder
from shared.bindings import BLOCK_TABLE, INPUT_IDS, WRITE_START
from shared.errors import WriteNotProven
from shared.kv_spec import Layout
from tests.support.decoder_steps import (
    LinearCaches,
    Rows,
    feed_linear,
    feed_pools,
    greedy_rows,
    junk_pools,
    pages_needed,
    scattered_table,
    with_weights,
)
from tests.support.decoders import FAMILIES, WINDOW, greedy, random_model, random_prompt, tiny_config

Export = Callable[[str, Layout], DecoderProgram]
PROMPTS = [random_prompt(length, seed=length) for length in (11, 3, 7)]


def writes_of(program: DecoderProgram) -> set[str]:
    return {node.name for node in program.program.graph.find_nodes(op="call_function", target=torch.ops.aten.index_put.default)}


def test_the_text_of_a_program_depends_on_what_it_computes_alone(linear: DecoderProgram) -> None:
    """Gemma 3 walks a set of layer kinds: the export's node order follows the process's hash seed, the lowered one must not."""

    def edit(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
        cos, sin = (next(n for n in graph.nodes if str(n.target) == f"aten.{name}.default") for name in ("cos", "sin"))
        cos.prepend(sin)

    def text(program: DecoderProgram) -> list[str]:
        return [f"{node.name} {node.target} {node.args}" for node in program.program.graph.nodes]

    shuffled = edited(linear, edit)
    assert text(shuffled) != text(linear)
    assert text(canonical_order(shuffled)) == text(linear)


def test_functionalize_makes_every_cache_a_mutation_output(exported: Export) -> None:
    program = functionalize(exported("llama", Layout.PAGED))
    mutated = {program.inputs[spec.target] for spec in program.program.graph_signature.output_specs if spec.target}
    assert mutated == {"k_cache.0", "k_cache.1", "v_cache.0", "v_cache.1"}
    assert len(writes_of(program)) == 4


def test_dead_inputs_go_and_live_ones_stay(exported: Export) -> None:
    """The embedding of a tied model and the copy of the rotary frequencies are read by nobody."""
    before = functionalize(exported("llama", Layout.PAGED))
    after = remove_dead_inputs(before)
    assert before.weights.keys() - after.weights.keys() == {"step.model.model.embed_tokens.weight"}
    assert before.constants.keys() - after.constants.keys() == {"step.model.model.rotary_emb.original_inv_freq"}
    assert after.program.state_dict.keys() == after.weights.keys()
    assert list(after.program.graph_signature.user_inputs) == list(before.program.graph_signature.user_inputs)


def test_sizes_come_from_the_tokens_alone(exported: Export) -> None:
    program = take_sizes_from_tokens(functionalize(exported("llama", Layout.PAGED)))
    reads = program.program.graph.find_nodes(op="call_function", target=torch.ops.aten.sym_size.int)
    assert {(str(node.args[0]), node.args[1]) for node in reads} == {(INPUT_IDS, 0), (INPUT_IDS, 1)}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_linear_form_still_says_what_the_export_says(exported: Export, family: str) -> None:
    export = exported(family, Layout.PAGED)
    weights = random_model(tiny_config(family)).state_dict()
    said = []
    for program in (export, lower_to_linear(export)):
        caches = LinearCaches(program.cache, 3, 40)
        said.append((greedy_rows(Rows(feed_linear(program, weights, caches), 3), PROMPTS, 6), caches.k, caches.v))
    assert said[0][0] == said[1][0]
    for eager, lowered in zip(said[0][1:], said[1][1:], strict=True):
        for left, right in zip(eager, lowered, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("family", FAMILIES)
def test_the_step_over_pools_equals_transformers(exported: Export, family: str, layout: Layout) -> None:
    """Ragged batch on scattered pages full of junk, in both layouts, proven on the way."""
    export = exported(family, layout)
    linear = lower_to_linear(export)
    report = prove_decoder(export, linear)
    assert report.ok, report.rows()
    program = lower_to_pools(linear, report.proven_nodes)
    model = random_model(tiny_config(family))
    num_pages = pages_needed(program.cache, 3)
    module = with_weights(program, model.state_dict())
    table, pools = scattered_table(program.cache, 3, num_pages), junk_pools(program.cache, num_pages)
    rows = Rows(feed_pools(lambda inputs: module(*inputs), table, pools), 3)
    assert greedy_rows(rows, PROMPTS, 8) == [greedy(model, prompt, 8) for prompt in PROMPTS]


@pytest.mark.parametrize("layout", list(Layout))
def test_the_paged_graph_is_one_op_a_layer(exported: Export, layout: Layout) -> None:
    program = lower_to_linear(exported("gemma3", layout))
    paged = lower_to_pools(program, writes_of(program))
    nodes = paged.program.graph.find_nodes(op="call_function", target=torch.ops.quire.paged_attend.default)
    pools = [node.args[3].name for node in nodes]
    assert [paged.inputs[name] for name in pools] == ["kv_pool.0", "kv_pool.1", "kv_pool.2"]
    assert [(node.args[6], node.args[8]) for node in nodes] == [(layout.page_dim, window) for window in (WINDOW, None, WINDOW)]
    assert not writes_of(paged)
    assert not paged.program.graph.find_nodes(op="call_function", target=torch.ops.quire.attend.default)
    assert len(paged.program.graph_signature.output_specs) == 1


@pytest.mark.parametrize(("layout", "shape"), [(Layout.PAGED, (None, 2, 2, 8, 16)), (Layout.LINEAR, (2, None, 2, 48, 16))])
def test_pools_and_block_table_are_inputs_with_free_sizes(exported: Export, layout: Layout, shape: tuple[int | None, ...]) -> None:
    """Pages and table width are dynamic down to the least a runtime may bind: two pages, a table of one."""
    program = lower_to_linear(exported("llama", layout))
    paged = lower_to_pools(program, writes_of(program))
    values = {
        paged.inputs[n.name]: n.meta["val"] for n in paged.program.graph.find_nodes(op="placeholder") if n.name in paged.inputs
    }
    assert tuple(size if isinstance(size, int) else None for size in values["kv_pool.0"].shape) == shape
    pages = values["kv_pool.1"].shape[layout.page_dim]
    ranges = {str(symbol): bounds for symbol, bounds in paged.program.range_constraints.items()}
    assert ranges[str(pages)].lower == 2
    width = values[BLOCK_TABLE].shape[1]
    if layout is Layout.LINEAR:
        assert width == 1
    else:
        assert (ranges[str(width)].lower, ranges[str(width)].upper) == (1, 6)
    assert str(values[BLOCK_TABLE].shape[0]) == str(values[INPUT_IDS].shape[0])


def test_projections_of_one_input_are_one_call(exported: Export) -> None:
    """Seven products a layer become four calls: q k v, o, gate up, down; and the head."""
    program = lower_to_linear(exported("llama", Layout.PAGED))
    paged = lower_to_pools(program, writes_of(program))
    calls = paged.program.graph.find_nodes(op="call_function", target=torch.ops.quire.linears.default)
    assert [len(node.args[1]) for node in calls] == [3, 1, 2, 1, 3, 1, 2, 1, 1]
    assert not paged.program.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    first = [weight.name.rpartition("self_attn_")[2] for weight in calls[0].args[1]]
    assert sorted(first) == ["k_proj_weight", "q_proj_weight", "v_proj_weight"]


def test_a_projection_with_a_bias_is_left_alone(exported: Export) -> None:
    program = lower_to_linear(exported("llama", Layout.PAGED))

    def edit(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
        first = graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)[0]
        first.args = (*first.args, nodes["p_step_model_model_norm_weight"])

    grouped = group_linears(edited(program, edit))
    assert len(grouped.program.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)) == 1


# --- refusals -------------------------------------------------------------------------------------------------------------------


def edited(program: DecoderProgram, edit: Callable[[fx.Graph, dict[str, fx.Node]], None]) -> DecoderProgram:
    """The program after `edit(graph, nodes by name)`."""
    graph = copy.deepcopy(program.program.graph)
    edit(graph, {node.name: node for node in graph.nodes})
    (output,) = graph.find_nodes(op="output")
    signature = program.program.graph_signature
    outputs = [
        OutputSpec(spec.kind, TensorArgument(value.name), spec.target)
        for spec, value in zip(signature.output_specs, output.args[0], strict=True)
    ]
    return replace(program, program=rebuild(program.program, graph, ExportGraphSignature(list(signature.input_specs), outputs)))


@pytest.fixture(scope="module")
def linear(exported: Export) -> DecoderProgram:
    return lower_to_linear(exported("llama", Layout.PAGED))


def logits_node(nodes: dict[str, fx.Node]) -> fx.Node:
    logits = nodes["output"].args[0][-1]
    assert isinstance(logits, fx.Node)
    return logits


def add_reader(graph: fx.Graph, nodes: dict[str, fx.Node], read: fx.Node) -> None:
    """Let the logits depend on `read` too: the sum of its elements, times zero."""
    logits = logits_node(nodes)
    with graph.inserting_before(nodes["output"]):
        total = graph.call_function(torch.ops.aten.sum.default, (read,))
        total.meta["val"] = read.meta["val"].sum()
        added = graph.call_function(torch.ops.aten.add.Tensor, (logits, total))
        added.meta["val"] = logits.meta["val"]
    nodes["output"].replace_input_with(logits, added)


def refused(program: DecoderProgram, proven: set[str], match: str) -> None:
    with pytest.raises(WriteNotProven, match=match):
        page_caches(program, proven)


def test_another_reader_of_the_old_cache_is_refused(linear: DecoderProgram) -> None:
    """In place it would see the new rows (measured: silently, even where it comes first)."""
    broken = edited(linear, lambda graph, nodes: add_reader(graph, nodes, nodes["k_cache_1"]))
    refused(broken, writes_of(broken), r"k_cache\.1 must be read by one index_put.*sum")


def test_another_reader_of_the_written_cache_is_refused(linear: DecoderProgram) -> None:
    """Over a pool there is no tensor it could read."""

    def edit(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
        write = next(iter(nodes["v_cache_0"].users))
        add_reader(graph, nodes, write)

    broken = edited(linear, edit)
    refused(broken, writes_of(broken), r"layer 0: only attend_default may read the written caches; sum")


def test_an_unproven_write_is_refused(linear: DecoderProgram) -> None:
    (cache,) = [node for node in linear.program.graph.find_nodes(op="placeholder") if node.name == "v_cache_1"]
    (write,) = [node.name for node in cache.users]
    refused(linear, writes_of(linear) - {write}, rf"v_cache\.1: no proof that {write}")


def test_an_attention_that_masks_by_another_start_is_refused(linear: DecoderProgram) -> None:
    """The write goes where the proof says; the mask must count from there too."""

    def edit(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
        nodes["attend_default_1"].update_arg(3, nodes["last_index"])

    broken = edited(linear, edit)
    refused(broken, writes_of(broken), rf"layer 1: attend_default_1 must mask by the input {WRITE_START}; it masks by last_index")


def test_keys_and_values_swapped_are_refused(linear: DecoderProgram) -> None:
    def edit(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
        k, v = nodes["attend_default"].args[1:3]
        nodes["attend_default"].update_arg(1, v)
        nodes["attend_default"].update_arg(2, k)

    broken = edited(linear, edit)
    refused(broken, writes_of(broken), r"layer 0: quire::attend must read")


def test_a_cache_read_by_the_wrong_layer_is_refused(linear: DecoderProgram) -> None:
    def edit(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
        nodes["attend_default_1"].update_arg(1, nodes["attend_default"].args[1])

    broken = edited(linear, edit)
    refused(broken, writes_of(broken), r"layer 0: only attend_default may read|layer 1: quire::attend must read")


def test_a_cache_returned_by_the_step_is_refused(linear: DecoderProgram) -> None:
    """BR-007's other half: an output that is the cache cannot be served from a pool."""

    def edit(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
        write = next(iter(nodes["k_cache_0"].users))
        logits = logits_node(nodes)
        nodes["output"].replace_input_with(logits, write)

    broken = edited(linear, edit)
    refused(broken, writes_of(broken), r"the step returns the cache index_put")


def test_parameters_are_inputs_not_constants(linear: DecoderProgram) -> None:
    kinds = {spec.kind for spec in linear.program.graph_signature.input_specs}
    assert kinds == {InputKind.PARAMETER, InputKind.BUFFER, InputKind.USER_INPUT}

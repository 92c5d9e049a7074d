"""Every rule holds of what the stages make and names the node once something breaks it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import fx
from torch.export.graph_signature import ExportGraphSignature, OutputKind, OutputSpec, TensorArgument

from compiler_service.export.program import DecoderProgram
from compiler_service.lowering import spec
from compiler_service.lowering.lower import PAGED_RULES, PASSES, lower_to_linear, lower_to_pools
from shared.errors import InternalError
from shared.kv_spec import Layout

Export = Callable[[str, Layout], DecoderProgram]
Edit = Callable[[fx.Graph, dict[str, fx.Node]], None]


@pytest.fixture(scope="module")
def linear(exported: Export) -> DecoderProgram:
    return lower_to_linear(exported("llama", Layout.PAGED))


@pytest.fixture(scope="module")
def paged(linear: DecoderProgram) -> DecoderProgram:
    writes = linear.program.graph.find_nodes(op="call_function", target=torch.ops.aten.index_put.default)
    return lower_to_pools(linear, {node.name for node in writes})


class Edited:
    """Just enough of an ExportedProgram to hold a graph that torch itself would refuse."""

    def __init__(self, program: DecoderProgram, edit: Edit, outputs: list[OutputSpec] | None = None) -> None:
        self.graph = copy.deepcopy(program.program.graph)
        edit(self.graph, {node.name: node for node in self.graph.nodes})
        signature = program.program.graph_signature
        self.graph_signature = ExportGraphSignature(list(signature.input_specs), outputs or list(signature.output_specs))


def breaches(rule: spec.Rule, program: DecoderProgram, edit: Edit, outputs: list[OutputSpec] | None = None) -> str:
    assert not list(rule(program))
    return "; ".join(rule(replace(program, program=Edited(program, edit, outputs))))


def nothing(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
    pass


def test_every_stage_has_rules() -> None:
    assert all(stage.rules for stage in PASSES)
    assert PAGED_RULES


def test_an_in_place_op_in_a_functional_graph(linear: DecoderProgram) -> None:
    def edit(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
        next(iter(nodes["k_cache_0"].users)).target = torch.ops.aten.index_put_.default

    assert "mutates an argument" in breaches(spec.nothing_mutates, linear, edit)


def test_a_change_of_something_that_is_no_cache(linear: DecoderProgram) -> None:
    first, *rest = linear.program.graph_signature.output_specs
    other = OutputSpec(OutputKind.USER_INPUT_MUTATION, TensorArgument(first.arg.name), "write_start")
    assert "changes write_start, which is no cache" in breaches(spec.only_caches_change, linear, nothing, [other, *rest])


def test_a_cache_that_nobody_writes(linear: DecoderProgram) -> None:
    _, *rest = linear.program.graph_signature.output_specs
    assert "4 caches should change, 3 do" in breaches(spec.only_caches_change, linear, nothing, rest)


def test_a_weight_that_nobody_reads(linear: DecoderProgram) -> None:
    def edit(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
        head = nodes["p_step_model_lm_head_weight"]
        head.replace_all_uses_with(nodes["p_step_model_model_norm_weight"])

    assert breaches(spec.everything_is_read, linear, edit) == "nothing reads step.model.lm_head.weight"


def test_inputs_in_another_order(paged: DecoderProgram) -> None:
    swapped = {"input_ids": "position_ids", "position_ids": "input_ids"}
    program = replace(paged, inputs={**paged.inputs, **swapped})
    assert not list(spec.inputs_are_bindings(paged))
    assert "inputs should be" in "".join(spec.inputs_are_bindings(program))


def test_a_copy_of_the_pool_before_the_attention(paged: DecoderProgram) -> None:
    """What Inductor would turn into a copy of the whole pool a layer."""

    def edit(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
        attend = next(iter(nodes["kv_pool_0"].users))
        with graph.inserting_before(attend):
            clone = graph.call_function(torch.ops.aten.clone.default, (nodes["kv_pool_0"],))
        attend.update_arg(3, clone)

    found = breaches(spec.pools_change_in_place, paged, edit)
    assert "kv_pool_0 should be the pool of one quire::paged_attend; ['clone_default'] use it" in found
    assert "changes something that is no pool" in found


def test_a_second_reader_of_the_pool(paged: DecoderProgram) -> None:
    def edit(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
        with graph.inserting_before(nodes["output"]):
            graph.call_function(torch.ops.aten.sum.default, (nodes["kv_pool_1"],))

    assert "kv_pool_1 should be the pool of one" in breaches(spec.pools_change_in_place, paged, edit)


def test_a_copy_into_a_pool(paged: DecoderProgram) -> None:
    """A scatter result written back: right, slow, and refused."""
    (logits,) = paged.program.graph_signature.output_specs
    copied = OutputSpec(OutputKind.USER_INPUT_MUTATION, TensorArgument("slice_scatter"), "kv_pool_0")
    assert breaches(spec.pools_change_in_place, paged, nothing, [copied, logits]) == "slice_scatter is copied into kv_pool_0"


def test_an_in_place_op_beside_the_attention(paged: DecoderProgram) -> None:
    def edit(graph: fx.Graph, nodes: dict[str, fx.Node]) -> None:
        with graph.inserting_before(nodes["output"]):
            graph.call_function(torch.ops.aten.zero_.default, (nodes["last_index"],))

    assert "zero__default changes something that is no pool" in breaches(spec.pools_change_in_place, paged, edit)


def test_a_broken_rule_is_our_bug_and_names_the_stage(linear: DecoderProgram) -> None:
    def never(program: DecoderProgram) -> list[str]:
        return ["node_7 is wrong", "node_8 too"]

    with pytest.raises(InternalError, match="after page_caches: node_7 is wrong; node_8 too"):
        spec.check(linear, "page_caches", (never,))

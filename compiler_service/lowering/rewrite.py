"""Put an edited graph and signature back together as an ExportedProgram."""

from __future__ import annotations

from typing import Any

import torch
from torch import SymInt, Tensor, fx
from torch._export.verifier import TrainingIRVerifier, Verifier
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import ExportGraphSignature, InputKind
from torch.utils import _pytree as pytree


def rebuild(
    source: ExportedProgram, graph: fx.Graph, signature: ExportGraphSignature, verifiers: list[type[Verifier]] | None = None
) -> ExportedProgram:
    """`source` with another graph and signature over the same user inputs; what the signature no longer names is left behind.

    `verifiers` are those of the new graph's dialect, by default those of `source`.
    """
    kept = (source.range_constraints, source.module_call_graph, source.example_inputs)
    return _program(source, graph, signature, *kept, verifiers or source.verifiers)


def rebuild_in_place(
    source: ExportedProgram,
    graph: fx.Graph,
    signature: ExportGraphSignature,
    sample_inputs: tuple[Tensor, ...],
) -> ExportedProgram:
    """`source` with a graph that mutates its inputs with an op of ours and takes exactly `sample_inputs`, positionally.

    Of torch.export's dialects only the training one lets a mutating op stand in the graph; our own spec (spec.py) is stricter.
    """
    return rebuild_with_inputs(source, graph, signature, sample_inputs, TrainingIRVerifier)


def rebuild_with_inputs(
    source: ExportedProgram,
    graph: fx.Graph,
    signature: ExportGraphSignature,
    sample_inputs: tuple[Tensor, ...],
    verifier: type[Verifier],
) -> ExportedProgram:
    """`source` with a graph of another interface: it takes exactly `sample_inputs`, positionally, and returns one tensor."""
    call = ModuleCallSignature(
        inputs=[],
        outputs=[],
        in_spec=pytree.tree_structure((sample_inputs, {})),
        out_spec=pytree.tree_structure(torch.empty(0)),
        forward_arg_names=[str(name) for name in signature.user_inputs],  # decomposing names the inputs by them
    )
    calls = [ModuleCallEntry("", call)]
    ranges = _size_ranges(graph, source.range_constraints)
    return _program(source, graph, signature, ranges, calls, (sample_inputs, {}), [verifier])


def sample_of(placeholder: fx.Node) -> Tensor:
    """A tensor of the sizes tracing saw. Its values mean nothing, so a long cache takes addresses and no memory."""
    value = placeholder.meta["val"]
    assert isinstance(value, FakeTensor)
    sizes = [size if isinstance(size, int) else size.node.hint for size in value.shape]
    return torch.empty(sizes, dtype=value.dtype, device=value.device)


def _program(
    source: ExportedProgram,
    graph: fx.Graph,
    signature: ExportGraphSignature,
    range_constraints: dict[Any, Any],
    calls: list[ModuleCallEntry],
    example_inputs: tuple[tuple[Any, ...], dict[str, Any]] | None,
    verifiers: list[type[Verifier]],
) -> ExportedProgram:
    graph.lint()
    named = {spec.target for spec in signature.input_specs if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER)}
    lifted = {spec.target for spec in signature.input_specs if spec.kind is InputKind.CONSTANT_TENSOR}
    return ExportedProgram(
        root=torch.nn.Module(),
        graph=graph,
        graph_signature=signature,
        state_dict={name: value for name, value in source.state_dict.items() if name in named},
        range_constraints=dict(range_constraints),
        module_call_graph=calls,
        example_inputs=example_inputs,
        constants={name: value for name, value in source.constants.items() if name in named or name in lifted},
        verifiers=verifiers,
    )


def _size_ranges(graph: fx.Graph, known: dict[Any, Any]) -> dict[Any, Any]:
    """Range of every dynamic size of the graph's inputs: as `known`, else as its shape environment holds it."""
    ranges = {}
    for node in graph.find_nodes(op="placeholder"):
        for size in node.meta["val"].shape:
            if isinstance(size, SymInt):
                symbol, shape_env = size.node.expr, size.node.shape_env
                assert shape_env is not None
                ranges[symbol] = known.get(symbol, shape_env.var_to_range[symbol])
    return ranges

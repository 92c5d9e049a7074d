"""Registration: schemas, export with a mutated pool, and hosts without a compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.export.graph_signature import OutputKind

from shared.kernels.attention import ops
from shared.kv_spec import Layout
from tests.support.attention import paged_layer
from tests.support.attention.cases import Case, make

ops.load_ops()


def test_schemas_are_the_contract() -> None:
    assert str(torch.ops.quire.attend.default._schema) == (
        "quire::attend(Tensor q, Tensor k_cache, Tensor v_cache, Tensor start, float scale, "
        "SymInt? window, float? softcap, Tensor? sinks) -> Tensor"
    ).replace("SymInt", "int")
    assert str(torch.ops.quire.paged_attend.default._schema) == (
        "quire::paged_attend(Tensor q, Tensor k, Tensor v, Tensor(a!) pool, Tensor block_table, Tensor start, int page_dim, "
        "float scale, int? window, float? softcap, Tensor? sinks) -> Tensor"
    )


def test_loading_again_changes_nothing() -> None:
    before = ops.implementation()
    ops.load_ops()
    assert ops.implementation() is before


@pytest.mark.parametrize("count", [1, 6])
def test_opcheck(count: int) -> None:
    """torch's own checks: the schema tells the truth about mutation, fakes match strides and dtype, functionalisation works."""
    inputs = make(Case(count=count, window=30, sinks=True))
    for op, arguments in (
        (torch.ops.quire.paged_attend.default, inputs.paged_arguments()),
        (torch.ops.quire.attend.default, (inputs.q, *(c.nan_to_num() for c in inputs.caches()), inputs.start, *inputs.options)),
    ):
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))


@pytest.mark.parametrize("layout", list(Layout))
def test_export_keeps_the_op_and_reports_both_pools_as_mutated(layout: Layout) -> None:
    program = paged_layer.export(layout)
    mutated = [spec.target for spec in program.graph_signature.output_specs if spec.kind is OutputKind.USER_INPUT_MUTATION]
    assert mutated == ["first", "second"]
    calls = [node for node in program.graph.nodes if node.op == "call_function" and "auto_functionalized" in str(node.target)]
    assert [call.args[0] for call in calls] == [torch.ops.quire.paged_attend.default] * 2
    scattering = [str(node.target) for node in program.graph.nodes if "scatter" in str(node.target) or "copy" in str(node.target)]
    assert scattering == []


@pytest.mark.parametrize("layout", list(Layout))
def test_exported_program_runs_at_every_size(layout: Layout) -> None:
    program = paged_layer.export(layout).module()
    torch.manual_seed(0)
    layers = paged_layer.PagedLayers(layout).eval()
    for batch, count, pages, starts in ((3, 5, 12, (3, 9, 0)), (1, 1, 8, (47,)), (2, 17, 9, (0, 31))):
        arguments = paged_layer.inputs(layout, batch, count, pages, starts)
        twins = [argument.clone() for argument in arguments]
        with torch.no_grad():
            torch.testing.assert_close(program(*arguments), layers(*twins))
        for pool, twin in zip(arguments[1:3], twins[1:3], strict=True):
            assert torch.equal(pool, twin)


WITHOUT_COMPILER = """
import logging, torch
logging.basicConfig()
from shared.kernels.attention import ops, reference
from tests.support.attention.cases import Case, make
assert ops.implementation() is ops.Implementation.REFERENCE
inputs, twin = make(Case(count=2)), make(Case(count=2))
out = torch.ops.quire.paged_attend(*inputs.paged_arguments())
assert torch.equal(out, reference.paged_attend(*twin.paged_arguments()))
assert torch.equal(inputs.pool.nan_to_num(), twin.pool.nan_to_num())
inputs.table[1, 2] = -1
try:
    torch.ops.quire.paged_attend(*inputs.paged_arguments())
except ValueError as error:
    print(error)
"""


def test_without_a_compiler_the_reference_serves_and_says_so(tmp_path: Path) -> None:
    env = {"CXX": "no-such-compiler", "QUIRE_CACHE": str(tmp_path), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_COMPILER], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "no C++ compiler" in run.stderr
    assert "runs on the reference" in run.stderr
    assert run.stdout.startswith("block_table[1, 2]: expected a page in 0..19, got -1")

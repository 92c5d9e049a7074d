"""A real AOTInductor package with the op inside: compiled once, run at several sizes, pools mutated where they lie."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch

from shared.kernels.attention import ops
from shared.kv_spec import Layout
from tests.support.attention import paged_layer

HUGE_PAGES = 2**20
"""Pages of a pool of 2 GiB of addresses, of which a run may touch a handful."""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    ops.load_ops()
    path = tmp_path_factory.mktemp("package") / "layers.pt2"
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(paged_layer.export(Layout.PAGED), package_path=str(path))
    return path


def peak_resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024


@pytest.mark.slow
def test_package_round_trip(package: Path) -> None:
    run = torch._inductor.aoti_load_package(str(package))
    torch.manual_seed(0)
    layers = paged_layer.PagedLayers(Layout.PAGED).eval()
    for batch, count, pages, starts in ((3, 5, 12, (3, 9, 0)), (1, 1, 8, (47,)), (2, 17, 9, (0, 31)), (3, 1, 10, (0, 7, 46))):
        arguments = paged_layer.inputs(Layout.PAGED, batch, count, pages, starts)
        twins = [argument.clone() for argument in arguments]
        addresses = [pool.data_ptr() for pool in arguments[1:3]]
        with torch.no_grad():
            torch.testing.assert_close(run(*arguments), layers(*twins))
        assert [pool.data_ptr() for pool in arguments[1:3]] == addresses
        for pool, twin in zip(arguments[1:3], twins[1:3], strict=True):
            torch.testing.assert_close(pool, twin)


@pytest.mark.slow
def test_work_does_not_depend_on_the_size_of_the_pools(package: Path) -> None:
    """A run on huge pools of untouched memory makes almost none of it resident: nothing copies a pool."""
    run = torch._inductor.aoti_load_package(str(package))
    hidden, _, _, table, start = paged_layer.inputs(Layout.PAGED, 2, 3, 8, (20, 0))
    pools = [torch.empty(HUGE_PAGES, 2, paged_layer.KV_HEADS, paged_layer.PAGE_SIZE, paged_layer.DIM) for _ in range(2)]
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts over
    before = peak_resident_bytes()
    with torch.no_grad():
        run(hidden, *pools, table, start)
    assert peak_resident_bytes() - before < 64 * 2**20


@pytest.mark.slow
def test_generated_code_calls_the_op_on_the_callers_pools(package: Path) -> None:
    with zipfile.ZipFile(package) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".wrapper.cpp")]
        code = archive.read(name).decode()
    assert code.count("aoti_torch_proxy_executor_call_function(proxy_executor") == 2
    assert "aoti_torch_copy_" not in code

"""A round takes no memory in proportion to the pools."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shared.kernels.build import find_compiler

PROGRAM = """
import resource, sys
import numpy as np, torch
from shared.kernels.compaction.modes import RowMode
from shared.kernels.compaction import cpu
from shared.kernels.compaction.inputs import RequestRound, RoundInputs
from shared.kernels.compaction.layout import CacheLayout
from shared.kernels.compaction.params import build_compaction_params, compact
from shared.kv_spec import DType, KVCacheSpec, LayerGroup, Layout

if sys.argv[1] == "portable":
    cpu.load_library = lambda *_: None
spec = KVCacheSpec((LayerGroup((0, 1), 8, 128, DType.BFLOAT16),), Layout.PAGED, 32, 8192)
table = torch.arange(1, 1025, dtype=torch.int32).view(4, 256)
pools = [torch.ones(spec.pool_shape(spec.groups[0], 1025), dtype=torch.bfloat16) for _ in range(2)]
layout = CacheLayout.from_spec(spec, pools, table)
inputs = RoundInputs.allocate(layout, row_mode=RowMode.UNION, keep_capacity=64)
params = build_compaction_params(layout, inputs)
compact(params, inputs.stage([RequestRound(np.arange(9, 10, dtype=np.int32)[None], 0, 8192)]))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
kept = np.arange(8191 - 64 * 120, 8191, 120, dtype=np.int32)[None]
compact(params, inputs.stage([RequestRound(kept, 0, 8192)] * 4))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) >> 10)
"""


@pytest.mark.parametrize("form", ["compiled", "portable"])
def test_peak_memory(form: str) -> None:
    """Pools of 256 MiB; the round may raise the peak by a few MiB of indices and chunks, not by a pool or a request of it."""
    if form == "compiled" and find_compiler() is None:
        pytest.skip("no C++ compiler on this host")
    done = subprocess.run([sys.executable, "-c", PROGRAM, form], capture_output=True, text=True, timeout=300, check=True)
    assert int(done.stdout) < 16

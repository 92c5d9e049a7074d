"""The Triton kernels on the CPU: the same source as on a GPU, under Triton's interpreter.

In a process of its own, since kernels decide for or against the interpreter when they are defined.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def run_module(*arguments: str) -> str:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *arguments], env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "only", ["seed exact bytes and tail, per_layer_head", "waits", "value", "changing", "far", "tail longer than the eviction"]
)
def test_catalogued_rounds(only: str) -> None:
    """Both ways to share out ordered lists, hole filling, scrubbing, what tiles wait for, the value check, rounds that change under
    one set of params, offsets past 2^31. There is more in it."""
    assert "0 of" in run_module("tests.gpu.compaction_check", "--device", "cpu", "--only", only)


def test_random_rounds() -> None:
    """BR-050 and its kin over random geometries; more with `--rounds`."""
    assert ": 0 differing bytes" in run_module(
        "tests.property.compaction_fuzz", "--mover", "triton", "--rounds", "8", "--seed", "100"
    )

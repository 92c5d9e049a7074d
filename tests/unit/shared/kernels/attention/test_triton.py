"""The Triton kernels without a GPU: interpreted against the specification, and compiled for the device they are meant for.

Triton decides when it is imported whether it interprets, so each half runs in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")


def run(script: str, *arguments: str, interpret: bool) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"OMP_NUM_THREADS": "1"} | ({"TRITON_INTERPRET": "1"} if interpret else {})
    command = [sys.executable, "-m", f"tests.support.attention.{script}", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=550, check=False)


def test_interpreted_kernels_equal_the_reference() -> None:
    done = run("interpreted", interpret=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.splitlines()[-1].startswith("checked ")


def test_kernels_compile_for_sm90_without_spilling() -> None:
    done = run("compiled", interpret=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]

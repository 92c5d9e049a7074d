"""Norms read in place against torch's, in both layouts, whatever the page and head sizes; other pages do not count."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from shared.kernels.key_norms.norms import bind_key_norms
from tests.support.key_norms.pools import norms_one_by_one, pools


@pytest.mark.parametrize(("layout", "page_size", "length"), [("paged", 16, 37), ("paged", 4, 16), ("linear", 96, 81)])
def test_pools_on_the_host(layout: str, page_size: int, length: int) -> None:
    keys = pools(layout, 2, page_size, 8, torch.bfloat16)
    index = torch.tensor([4, 2, 6, 1, 5][: -(-length // page_size)])
    torch.testing.assert_close(bind_key_norms(keys)(index, length), norms_one_by_one(keys, index, length))


def test_the_kernel_interpreted() -> None:
    """In a process of its own, because Triton decides that when it is imported."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.support.key_norms.interpreted"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "checked"


def test_layers_that_differ_are_refused() -> None:
    pytest.importorskip("triton")
    from shared.kernels.key_norms.launch import BoundKeyNorms

    keys = pools("paged", 2, 4, 8, torch.float32)
    with pytest.raises(ValueError, match="layers must be alike"):
        BoundKeyNorms([keys[0], keys[1][:, :1]])
    with pytest.raises(ValueError, match=r"to be scored, got torch\.int8"):
        BoundKeyNorms([layer.to(torch.int8) for layer in keys])

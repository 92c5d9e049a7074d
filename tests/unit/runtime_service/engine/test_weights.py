"""Weights that do not fit on the GPU are refused with both numbers before anything is copied there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from runtime_service.engine import weights
from runtime_service.engine.weights import WeightsCache
from shared.errors import MemoryExhausted


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A weights file beside a GPU with 1000 of 2000 bytes free."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000, 2000))
    save_file({"w": torch.zeros(250)}, tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors"


def test_too_large_weights_are_refused_before_they_are_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "load_file", lambda *_, **__: pytest.fail("the file was read"))
    size = file.stat().st_size
    with pytest.raises(MemoryExhausted, match=f"take {size} bytes of GPU memory, 1000 of 2000 are free") as refused:
        WeightsCache().get("m", file, "cuda")
    assert refused.value.details == {"field": "weights", "expected": f"{size} bytes", "got": "1000 bytes"}


def test_what_fits_is_read_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (file.stat().st_size, 1 << 20))
    read = []
    monkeypatch.setattr(weights, "load_file", lambda path, device: read.append(device) or {"w": torch.zeros(250)})
    cache = WeightsCache()
    assert cache.get("m", file, "cuda") is cache.get("m", file, "cuda")
    assert read == ["cuda"]


def test_the_hosts_memory_is_not_asked_about(file: Path) -> None:
    assert WeightsCache().get("m", file).tensors["w"].numel() == 250

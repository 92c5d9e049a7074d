"""The device a runtime says it has is the one its engines run on."""

from __future__ import annotations

import pytest
import torch

from runtime_service.service import describe
from shared import gpu
from shared.inductor.toolchain import runtime_toolchain


def test_a_gpu_is_named_with_its_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    toolchain = runtime_toolchain()  # before anybody registers ops for a GPU that is not there
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert gpu.compute_capability() == "sm90"
    device = describe.device_description()
    assert (device.kind, device.name, device.compute_capability, list(device.isa)) == ("cuda", "NVIDIA H200", "sm90", [])
    assert dict(device.toolchain) == toolchain


def test_without_one_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    device = describe.device_description()
    assert (device.kind, device.compute_capability) == ("cpu", "")
    assert device.isa

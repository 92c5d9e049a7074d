"""By the manifest alone: which host an engine can run on. Devices and libraries are the test's own; no GPU is needed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from runtime_service.engine.host import check_host
from runtime_service.engine.tensorrt import library
from shared.errors import EngineIncompatible
from shared.kv_spec import Layout
from shared.manifest import EngineManifest, Target
from tests.support.tiny_engine import TinyModel, tiny_manifest

RTX = replace(
    tiny_manifest(TinyModel().spec(Layout.LINEAR, 64, 64), ("decode=8x1", "prefill=2x16"), (1,)),
    backend="tensorrt_rtx",
    target=Target("cuda", (), ("sm80",)),
    toolchain={"tensorrt_rtx": "1.6.1"},
)
DATACENTRE = replace(RTX, backend="tensorrt", toolchain={"tensorrt": "10.1"})


def on_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], version: str | None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda _: version and object())
    monkeypatch.setattr(library, "load_library", lambda _: SimpleNamespace(__version__=version))


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_rtx_plans_run_on_their_gpu_and_newer_ones(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    on_gpu(monkeypatch, capability, "1.6.1")
    check_host(RTX)


@pytest.mark.parametrize(
    ("manifest", "capability", "version", "field_name", "got"),
    [
        (RTX, (7, 5), "1.6.1", "target.compute_capabilities", "sm75"),
        (RTX, (8, 0), "1.6.2", "toolchain.tensorrt_rtx", "1.6.2"),
        (RTX, (8, 0), None, "toolchain.tensorrt_rtx", "not installed"),
        (DATACENTRE, (9, 0), "10.1", "target.compute_capabilities", "sm90"),
    ],
)
def test_what_does_not_fit_this_host_is_named(
    monkeypatch: pytest.MonkeyPatch,
    manifest: EngineManifest,
    capability: tuple[int, int],
    version: str | None,
    field_name: str,
    got: str,
) -> None:
    on_gpu(monkeypatch, capability, version)
    with pytest.raises(EngineIncompatible) as caught:
        check_host(manifest)
    assert (caught.value.details["field"], caught.value.details["got"]) == (field_name, got)


def test_a_host_without_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EngineIncompatible, match="without an NVIDIA GPU"):
        check_host(RTX)


def test_an_inductor_engine_for_a_gpu_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EngineIncompatible, match=r"target\.device: the engine needs cuda, here is cpu"):
        check_host(replace(RTX, backend="inductor", toolchain={}))

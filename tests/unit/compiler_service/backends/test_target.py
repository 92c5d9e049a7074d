"""What an engine asks of a CPU is what the compiler was allowed to use, and no more than this host has."""

from __future__ import annotations

import pytest
from torch._inductor.cpu_vec_isa import InvalidVecISA, VecAMX, VecAVX2, VecAVX512, VecISA

from compiler_service.backends.inductor import target
from compiler_service.backends.inductor.target import build_toolchain, choose_target, host_target, x86_target
from shared.errors import BackendUnavailable
from shared.inductor.isa import X86_64_V3, X86_64_V4, host_features
from shared.inductor.toolchain import runtime_toolchain
from shared.manifest import Target


@pytest.mark.parametrize(
    ("isa", "march", "features"),
    [
        (VecAVX2(), "x86-64-v3", {*X86_64_V3}),
        (VecAVX512(), "x86-64-v4", {*X86_64_V4}),
        (VecAMX(), "x86-64-v4", {*X86_64_V4, "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8"}),
    ],
)
def test_a_target_is_a_standard_level_and_its_extensions(isa: VecISA, march: str, features: set[str]) -> None:
    """Never `-march=native`: an engine built on a newer CPU of the same level runs on an older one."""
    made = x86_target(isa)
    assert made.march == march
    assert features <= set(made.features) <= features | {"avx512_bf16", "amx_fp16"}
    assert list(made.features) == sorted(made.features)


def test_this_host_can_run_what_it_builds() -> None:
    made = host_target()
    assert made.manifest_target.device == "cpu"
    assert set(made.features) <= host_features()


def test_a_host_without_vectors_or_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "pick_vec_isa", InvalidVecISA)
    with pytest.raises(BackendUnavailable, match=r"C\+\+ compiler"):
        host_target()


def test_the_build_records_what_loading_compares() -> None:
    assert runtime_toolchain().items() < build_toolchain().items()


@pytest.mark.parametrize("here", ["", "sm90"])
def test_a_gpu_this_host_does_not_have_is_refused_with_both_names(here: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "compute_capability", lambda: here)
    with pytest.raises(BackendUnavailable, match=f"sm80 was asked for, here is {here or 'no GPU'}"):
        choose_target("sm80")


def test_the_gpu_of_this_host_is_the_engines_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "compute_capability", lambda: "sm90")
    assert choose_target("sm90").manifest_target == Target(device="cuda", isa=(), compute_capabilities=("sm90",))

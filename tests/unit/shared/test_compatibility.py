"""Whether a device runs an engine, field by field."""

import dataclasses

import pytest

from shared.compatibility import MUST_MATCH, Compatibility, Device, Level, compare
from shared.inductor.toolchain import runtime_toolchain
from shared.kv_spec import Layout
from shared.manifest import Target
from tests.support.tiny_engine import TinyModel, tiny_manifest

AVX2 = ("avx2", "fma")
BASE = tiny_manifest(TinyModel().spec(Layout.PAGED, 4, 64), ("decode=8x1", "prefill=2x16"), (1,))
CPU = Device("cpu", frozenset({*AVX2, "sse"}), "", {"torch": "2.14.1", "ops": "abc", "cpp": "g++ 13"})


def manifest(target=None, **toolchain):
    versions = {"torch": "2.14.1", "ops": "abc", "cpp": "g++ 12", "transformers": "5.24.0"} | toolchain
    return dataclasses.replace(BASE, target=target or Target("cpu", AVX2, ()), toolchain=versions)


def test_a_device_of_the_same_kind_is_optimal():
    """What only decided the build (compiler, transformers) may differ."""
    assert compare(manifest(), CPU) == Compatibility(Level.OPTIMAL)


def test_a_missing_instruction_set_is_named():
    found = compare(manifest(Target("cpu", (*AVX2, "avx512f", "amx_tile"), ())), CPU)
    assert (found.level, found.field, found.got) == (Level.UNSUPPORTED, "target.isa", "a CPU without amx_tile avx512f")
    assert "avx512f" in found.expected


def test_an_engine_without_the_widest_vectors_runs_but_not_best():
    wide = dataclasses.replace(CPU, isa=CPU.isa | {"avx512f"})
    assert compare(manifest(), wide).level is Level.PREFER_RECOMPILE
    assert compare(manifest(Target("cpu", (*AVX2, "avx512f"), ())), wide).level is Level.OPTIMAL


def test_another_kind_of_device():
    assert compare(manifest(), dataclasses.replace(CPU, kind="cuda")) == Compatibility(
        Level.UNSUPPORTED, "target.device", "cpu", "cuda"
    )


@pytest.mark.parametrize("name", MUST_MATCH)
def test_versions_that_must_match(name):
    """BR-147: both values are told."""
    other = dataclasses.replace(CPU, toolchain=CPU.toolchain | {name: "other"})
    wanted = manifest().toolchain[name]
    assert compare(manifest(), other) == Compatibility(Level.UNSUPPORTED, f"toolchain.{name}", wanted, "other")
    silent = dataclasses.replace(CPU, toolchain={k: v for k, v in CPU.toolchain.items() if k != name})
    assert compare(manifest(), silent).got == "none stated"


def test_compute_capability_not_index_decides():
    """BR-148."""
    built = manifest(Target("cuda", (), ("sm86",)))
    device = Device("cuda", frozenset(), "sm86", CPU.toolchain)
    assert compare(built, device).level is Level.OPTIMAL
    found = compare(built, dataclasses.replace(device, compute_capability="sm75"))
    assert found == Compatibility(Level.UNSUPPORTED, "target.compute_capabilities", "sm86", "sm75")


def test_the_names_are_those_the_toolchain_has():
    assert set(MUST_MATCH) == set(runtime_toolchain())

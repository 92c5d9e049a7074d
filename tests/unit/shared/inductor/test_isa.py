"""Which CPU an engine needs is read from compiler flags; which one this is, from /proc/cpuinfo."""

from __future__ import annotations

import pytest

from shared.inductor.isa import X86_64_V3, X86_64_V4, features_of_flags, parse_cpuinfo

CPUINFO = """\
processor\t: 0
model name\t: two kinds of core
flags\t\t: fpu sse2 avx avx2 fma avx512f
bugs\t\t: spectre_v1

processor\t: 1
flags\t\t: fpu sse2 avx avx2 fma
"""


def test_a_feature_counts_only_if_every_core_has_it() -> None:
    assert parse_cpuinfo(CPUINFO) == {"fpu", "sse2", "avx", "avx2", "fma"}


def test_arm_lists_features() -> None:
    assert parse_cpuinfo("processor : 0\nFeatures : fp asimd sve\n") == {"fp", "asimd", "sve"}


def test_a_system_that_does_not_tell_has_no_features() -> None:
    assert parse_cpuinfo("cpu : POWER9\n") == frozenset()


def test_flags_are_named_as_the_kernel_names_features() -> None:
    assert features_of_flags(["-mavx512f", "-mavx512vnni", "-mamx-tile", "-mavx512bf16"]) == (
        "amx_tile",
        "avx512_bf16",
        "avx512_vnni",
        "avx512f",
    )


def test_an_unknown_flag_is_an_error_not_a_portable_engine() -> None:
    with pytest.raises(KeyError, match="-mavx1024"):
        features_of_flags(["-mavx1024"])


def test_levels_are_nested() -> None:
    assert set(X86_64_V3) < set(X86_64_V4)

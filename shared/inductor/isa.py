"""Which CPU features an engine needs, and which this host has. Names are those of /proc/cpuinfo."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

X86_64_V3 = ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")
"""What code compiled with `-march=x86-64-v3` may use beyond every x86-64."""
X86_64_V4 = (*X86_64_V3, "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")

_FEATURE_OF_FLAG = {
    "-mavx2": "avx2",
    "-mfma": "fma",
    "-mf16c": "f16c",
    "-mavx512f": "avx512f",
    "-mavx512dq": "avx512dq",
    "-mavx512vl": "avx512vl",
    "-mavx512bw": "avx512bw",
    "-mavx512bf16": "avx512_bf16",
    "-mavx512vnni": "avx512_vnni",
    "-mamx-tile": "amx_tile",
    "-mamx-bf16": "amx_bf16",
    "-mamx-int8": "amx_int8",
    "-mamx-fp16": "amx_fp16",
}


def features_of_flags(flags: Iterable[str]) -> tuple[str, ...]:
    """CPU features that code compiled with these `-m` flags may use, sorted. KeyError for a flag nobody has mapped."""
    return tuple(sorted({_FEATURE_OF_FLAG[flag] for flag in flags}))


@cache
def host_features() -> frozenset[str]:
    """Features of this host's CPU; empty where the system does not tell."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    return parse_cpuinfo(text)


def parse_cpuinfo(text: str) -> frozenset[str]:
    """Features every processor of a /proc/cpuinfo has (`flags` on x86, `Features` on arm)."""
    lines = [line.split(":", 1)[1].split() for line in text.splitlines() if line.startswith(("flags", "Features"))]
    return frozenset.intersection(*map(frozenset, lines)) if lines else frozenset()

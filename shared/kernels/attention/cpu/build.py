"""Build the compiled CPU kernels on first use and load them.

One library for each digest of source, torch and processor, in `$QUIRE_CACHE/kernels/<digest>/` (default `~/.cache/quire`).
Processes that ask at once build once: the first holds a file lock, the others wait for it and find the finished library.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

_log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("ops.cpp")
_HEADERS = ("vec.h", "cells.h", "decode.h", "prefill.h")
_LIBRARY = "attention.so"
_TIMEOUT_S = 600.0


class BuildError(Exception):
    """The kernels cannot be built or loaded here; the message says why."""


def load_kernels() -> Path:
    """Register the compiled kernels with torch's dispatcher, building them if this cache has none; returns the library's path.

    BuildError when there is no compiler, it fails, or what it made does not load.
    """
    library = build_kernels(cache_directory())
    try:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]  # torch leaves it without types
    except OSError as error:
        raise BuildError(f"{library} does not load: {error.__cause__ or error}; delete its folder to build it again") from error
    return library


def cache_directory() -> Path:
    """`$QUIRE_CACHE/kernels`, by default in the user's cache."""
    return Path(os.environ.get("QUIRE_CACHE") or Path.home() / ".cache" / "quire") / "kernels"


def build_kernels(cache: Path) -> Path:
    """Path of the library for this source, torch and processor below `cache`, built unless it is there."""
    command = _compile_command()
    home = cache / _digest(command)
    library = home / _LIBRARY
    if library.exists():
        return library
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with home.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file closes, also by a crash
            if not library.exists():
                _build(command, home)
    except OSError as error:
        raise BuildError(f"cannot write {cache}: {error}; set QUIRE_CACHE to a writable folder") from error
    return library


def _build(command: list[str], home: Path) -> None:
    """Compile next to `home` and rename: a library that can be seen is complete."""
    with tempfile.TemporaryDirectory(prefix=f"{home.name}.", dir=home.parent) as scratch:
        _log.info("building the attention kernels into %s", home)
        out = Path(scratch) / "out"
        out.mkdir()
        try:
            done = subprocess.run(  # noqa: S603 - the compiler from PATH or CXX, on our own source
                [*command, "-o", str(out / _LIBRARY)], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"{command[0]} did not finish in {_TIMEOUT_S:.0f} s") from error
        if done.returncode != 0:
            raise BuildError(f"{command[0]} ended with {done.returncode}: {done.stderr[:2000]}")
        out.rename(home)


def _compile_command() -> list[str]:
    """The whole command but the output's name. BuildError when there is no compiler."""
    wanted = os.environ.get("CXX", "c++")
    compiler = shutil.which(wanted)
    if compiler is None:
        raise BuildError(f"no C++ compiler {wanted!r} on PATH; install g++ or set CXX")
    capability = torch.backends.cpu.get_cpu_capability()
    macros = [f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}"] if capability in ("AVX2", "AVX512") else []
    home = Path(torch.__file__).parent
    return [
        compiler,
        *("-std=c++20", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared"),
        *macros,
        *(f"-isystem{home / include}" for include in ("include", "include/torch/csrc/api/include")),
        f"-L{home / 'lib'}",
        str(_SOURCE),
        *("-ltorch_cpu", "-ltorch", "-lc10"),
    ]


def _digest(command: list[str]) -> str:
    """Names everything the library depends on: what is compiled, how, for which torch and on which processor."""
    parts = [path.read_bytes() for path in (_SOURCE, *(_SOURCE.with_name(name) for name in _HEADERS))]
    parts += [text.encode() for text in (*command, torch.__version__, platform.machine(), _processor_features())]
    return hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:32]


def _processor_features() -> str:
    """The instruction sets `-march=native` chooses from."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())

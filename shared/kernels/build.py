"""Compiles a kernel family's C++ into a cached shared library, once a machine, and loads its operators.

The library lies at `${QUIRE_CACHE:-~/.cache/quire}/kernels/<digest>/<name>.so`. The digest covers everything that decides the
machine code: source bytes, torch's version (its headers and ABI), the compiler, the flags and the CPU's feature flags
(`-march=native`), so machines of different kinds may share one cache directory. A half-written library is never visible: it
is compiled under a file lock beside its final place and renamed into it.
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
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from shared.cache import cache_root
from shared.errors import BuildFailed

logger = logging.getLogger(__name__)

COMPILE_TIMEOUT_S = 900
_CFLAGS = ("-std=c++20", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-DNDEBUG", "-w")

_loading = threading.Lock()
_loaded: dict[str, Path] = {}
"""What this process has loaded, by name."""


def load_library(name: str, sources: Sequence[Path], extra_cflags: Sequence[str] = (), headers: Sequence[Path] = ()) -> Path | None:
    """Build `sources` into one library (or find it built), load it with `torch.ops.load_library`, and return its path.

    `headers` are the files of ours that the sources include.

    The sources register their operators themselves (`TORCH_LIBRARY_FRAGMENT`), and torch ends a process in which two libraries
    register one operator: what a process has loaded as `name` it keeps, even if the sources have been edited since.
    Returns None, with the reason logged, where there is no compiler or nowhere to put the library: the caller then uses its
    portable path. Raises BuildFailed when the compiler rejects the sources: that is a broken toolchain or a bug, never a fallback.
    """
    with _loading:
        if name not in _loaded:
            library = _built(name, sources, extra_cflags, headers)
            if library is None:
                return None
            torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]  # untyped in torch
            _loaded[name] = library
        return _loaded[name]


def _built(name: str, sources: Sequence[Path], extra_cflags: Sequence[str], headers: Sequence[Path]) -> Path | None:
    """The library's path, compiled unless it was before; None where it cannot be."""
    compiler = find_compiler()
    if compiler is None:
        logger.warning("kernel library %s not built: no C++ compiler (set CXX or install g++)", name)
        return None
    cflags = (*_CFLAGS, *extra_cflags)
    digest = library_digest(name, [*sources, *headers], cflags, compiler)
    library = cache_root() / "kernels" / digest / f"{name}.so"
    if not library.exists():
        try:
            library.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(library.parent / "lock", os.O_CREAT | os.O_RDWR, 0o644)
        except OSError as error:
            logger.warning("kernel library %s not built: %s (point QUIRE_CACHE at a writable directory)", name, error)
            return None
        with _locked(lock):
            if not library.exists():  # another process may have published it while this one waited
                _compile(compiler, sources, cflags, library)
    return library


def vector_macros() -> tuple[str, ...]:
    """What gives ATen's vectors this host's width: they have it by macros, not by -march, and are portable arrays without them."""
    capability = torch.backends.cpu.get_cpu_capability()
    return (f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}") if capability in ("AVX2", "AVX512") else ()


def find_compiler() -> str | None:
    """Absolute path of the C++ compiler: `$CXX`, else the first of c++, g++, clang++ on the PATH; None if there is none."""
    candidates = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next((path for path in map(shutil.which, candidates) if path), None)


def library_digest(name: str, sources: Sequence[Path], cflags: Sequence[str], compiler: str) -> str:
    """Hex key of one build; changes with anything that may change the machine code."""
    digest = hashlib.sha256()
    facts = [name, torch.__version__, _compiler_version(compiler), platform.machine(), _cpu_flags(), *cflags]
    for part in [*(fact.encode() for fact in facts), *(source.read_bytes() for source in sources)]:
        digest.update(len(part).to_bytes(8, "little"))  # lengths keep ("ab", "c") apart from ("a", "bc")
        digest.update(part)
    return digest.hexdigest()[:32]


@cache
def _compiler_version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout  # noqa: S603 - found on PATH


@cache
def _cpu_flags() -> str:
    """The CPU's feature list, which is what `-march=native` resolves to; empty where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((" ".join(sorted(line.split(":", 1)[1].split())) for line in lines if line.startswith(("flags", "Features"))), "")


@contextmanager
def _locked(descriptor: int) -> Iterator[None]:
    """Hold an exclusive lock on an open file, and close it. The kernel drops the lock of a process that dies."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _compile(compiler: str, sources: Sequence[Path], cflags: Sequence[str], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as scratch:
        built = Path(scratch) / library.name
        # Plain paths instead of torch.utils.cpp_extension: that imports setuptools, which a serving host need not have.
        root = Path(torch.__file__).parent
        command = [compiler, *cflags, f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
        command += [*map(str, sources), f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10", "-o", str(built)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)  # noqa: S603 - no shell
        if run.returncode != 0:
            raise BuildFailed(
                f"{compiler} rejected kernel library {library.stem} (exit {run.returncode}): {run.stderr[-2000:]}",
                details={"command": " ".join(command)},
            )
        built.replace(library)
